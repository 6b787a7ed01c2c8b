"""Collectives with gradients, as hand-written parallel layers have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def total(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks; no gradient."""
    whole = part.detach().contiguous().clone()
    dist.all_reduce(whole, group=group)
    return whole


def joined(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, one after the other; no gradient."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def own(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part."""
    return whole.chunk(group.size(), dim)[group.rank()]


class Copy(torch.autograd.Function):
    """The same forward; backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """As it is."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Of all ranks."""
        return total(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over ranks; backward the same for each."""

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Of all ranks."""
        return total(part, group)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it is."""
        return gradient, None


class Scatter(torch.autograd.Function):
    """This rank's part of what all have; backward the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        """One part."""
        ctx.dim, ctx.group = dim, group
        return own(whole, dim, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """All parts."""
        return joined(gradient, ctx.dim, ctx.group), None, None


class Gather(torch.autograd.Function):
    """The parts of all ranks; backward this rank's part, of the gradient here or of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup, sums: bool) -> torch.Tensor:
        """All parts."""
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        return joined(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """One part."""
        whole = total(gradient, ctx.group) if ctx.sums else gradient
        return own(whole, ctx.dim, ctx.group), None, None, None
