"""Moves of activations over the ranks of an axis, each with its derivative: what Megatron calls regions of tensor parallelism.

On functional collectives, whose own derivatives lack two things: parts of unequal size, which are padded here, and gradients that
lie otherwise than the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import Route


@dataclass(slots=True, kw_only=True)
class AxisRanks:
    """The ranks of an axis, as one of them sees them. Mutable."""

    group: ProcessGroup
    """For collectives."""
    size: int
    """How many there are."""
    index: int
    """Which of them this one is."""
    rows: int = 0
    """Rows, or positions, that they share out of the microbatch that is computed."""

    def move(self, values: torch.Tensor, route: Route) -> torch.Tensor:
        """Values as the route's target has them."""
        if self.size == 1 or not route.moves:
            return values
        moved: torch.Tensor = Move.apply(values, self, route)  # type: ignore[no-untyped-call]
        return moved

    def used_by_all(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that each rank has whole and uses for values of its own: its gradient is the sum over ranks."""
        if self.size == 1:
            return parameter
        used: torch.Tensor = UsedByAll.apply(parameter, self)  # type: ignore[no-untyped-call]
        return used

    def added_once(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that each rank has whole, as its addend of a sum over ranks in which it is once.

        Its gradient is that of the sum, which each rank has: nothing is communicated.
        """
        if self.size == 1:
            return parameter
        addend: torch.Tensor = AddedOnce.apply(parameter, self)  # type: ignore[no-untyped-call]
        return addend

    def first(self, size: int) -> int:
        """The first index of this rank's part of a dim."""
        return min(chunk_size(size, self.size) * self.index, size)

    def own_part(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along a dim, a view."""
        size = values.shape[dim]
        return values.narrow(dim, self.first(size), chunk_sizes(size, self.size)[self.index])

    def own_parameter(self, parameter: torch.Tensor, dim: int | None) -> nn.Parameter:
        """This rank's part of a parameter along a dim, a parameter again; the same where none is cut."""
        assert isinstance(parameter, nn.Parameter), type(parameter)
        if dim is None or self.size == 1:
            return parameter
        return nn.Parameter(self.own_part(parameter.detach(), dim).clone(), requires_grad=parameter.requires_grad)

    def placed(
        self, values: torch.Tensor, source: ActivationPlacement, target: ActivationPlacement, extents: tuple[int, int]
    ) -> torch.Tensor:
        """Values moved from one way to lie to another, without a derivative; `extents` are those of rows and features."""
        if source is target:
            return values
        if source is ActivationPlacement.PENDING:
            if target is ActivationPlacement.WHOLE:
                return self.sum(values)
            return self._sum_of_part(values, dim_of(target))
        if source is not ActivationPlacement.WHOLE:
            values = self._gathered(values, dim_of(source), extents[dim_of(source)])
        return values if target is ActivationPlacement.WHOLE else self.own_part(values, dim_of(target))

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return waited(collectives.all_reduce(addend.contiguous(), "sum", self.group))

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over ranks, without a derivative."""
        return waited(collectives.all_reduce(values.contiguous(), "max", self.group))

    def _gathered(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        rows = padded(part.movedim(dim, 0), chunk_size(extent, self.size))
        gathered = waited(collectives.all_gather_tensor(rows, 0, self.group))
        return gathered.narrow(0, 0, extent).movedim(0, dim)

    def _sum_of_part(self, addend: torch.Tensor, dim: int) -> torch.Tensor:
        extent = addend.shape[dim]
        rows = padded(addend.movedim(dim, 0), chunk_size(extent, self.size) * self.size)
        part = waited(collectives.reduce_scatter_tensor(rows, "sum", 0, self.group))
        return part.narrow(0, 0, chunk_sizes(extent, self.size)[self.index]).movedim(0, dim)


class Move(torch.autograd.Function):
    """A route in both directions. Every rank calls both, whatever it holds."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: AxisRanks, route: Route) -> torch.Tensor:
        """Move the values."""
        ctx.ranks, ctx.route, ctx.extents = ranks, route, (ranks.rows, route.features)
        moved = ranks.placed(values, route.source, route.target, ctx.extents)
        return moved.view_as(moved) if moved is values else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Move the gradient."""
        route = ctx.route
        return ctx.ranks.placed(gradients[0], route.gradient_source, route.gradient_target, ctx.extents), None, None


class UsedByAll(torch.autograd.Function):
    """Nothing forward, a sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ranks: AxisRanks) -> torch.Tensor:
        """The parameter."""
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The sum over ranks."""
        return ctx.ranks.sum(gradients[0]), None


class AddedOnce(torch.autograd.Function):
    """On the first rank as it is, on others zero; backward as it is."""

    @staticmethod
    def forward(_ctx: Any, parameter: torch.Tensor, ranks: AxisRanks) -> torch.Tensor:
        """This rank's addend."""
        return torch.zeros_like(parameter) if ranks.index else parameter.view_as(parameter)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of the sum, and so of what is in it once."""
        return gradients[0], None


def dim_of(lies: ActivationPlacement) -> int:
    """The dim that is cut, from the end: rows, or positions where rows are sequences, or features."""
    return -2 if lies is ActivationPlacement.ROWS else -1


def padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Rows with zeros after them, up to a length."""
    missing = length - rows.shape[0]
    return functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing)) if missing else rows.contiguous()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective returns, once it is there."""
    wait: Any = collectives.wait_tensor
    found: torch.Tensor = wait(tensor)
    return found
