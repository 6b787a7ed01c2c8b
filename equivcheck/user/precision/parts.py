"""Split batches into parts and join outputs, with gradients as if each part were the full batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivcheck.user.batches import mapped


def part(value: Any, number: int, count: int, rows: int | None = None) -> Any:
    """Return one of `count` equal parts for every tensor with `rows` rows.

    If `rows` is None, every tensor with divisible rows is split. The parts are copies.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] % count == 0 and rows in (None, tensor.shape[0])
        return tensor.chunk(count)[number].clone() if fits and count > 1 else tensor

    return mapped(value, cut)


def num_rows(value: Any) -> int | None:
    """Number of rows in the first tensor; None if no tensor has rows."""
    found: list[int] = []
    mapped(value, lambda tensor: found.extend(tensor.shape[:1]) or tensor)  # type: ignore[func-returns-value]
    return found[0] if found else None


def joined(values: Sequence[Any]) -> Any:
    """Join outputs structure by structure. Scalars are averaged; other values come from the first part."""
    return combined(values, _Joined.apply)


def combined(values: Sequence[Any], combine: Callable[..., torch.Tensor]) -> Any:
    """Apply `combine` to the tensors at each position and return them in the common structure."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return combine(*values)
    if isinstance(first, dict):
        whole = copy.copy(first)
        for key in first:
            whole[key] = combined([value[key] for value in values], combine)
        return whole
    if isinstance(first, (tuple, list)):
        members = [combined(group, combine) for group in zip(*values, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    return first


class _Joined(torch.autograd.Function):
    """Concatenates rows, or averages scalars. In backward each part gets its gradient times the number of parts."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        if parts[0].dim():
            return torch.cat(parts)
        return torch.stack(parts).mean() if parts[0].is_floating_point() else parts[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.count).chunk(ctx.count) if gradient.dim() else (gradient,) * ctx.count


class Total(torch.autograd.Function):
    """Mean or sum of the parts' losses in float64. In backward each part gets the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, share: float, factor: float, *losses: torch.Tensor) -> torch.Tensor:
        """Return the sum times `share`."""
        ctx.factor, ctx.kinds = factor, [loss.dtype for loss in losses]
        return torch.stack([loss.double() for loss in losses]).sum() * share

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient times `factor` in the type of each loss."""
        return None, None, *((gradients[0] * ctx.factor).to(kind) for kind in ctx.kinds)
