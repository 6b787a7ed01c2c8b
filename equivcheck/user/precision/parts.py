"""What a model gives for the parts of a batch, as one; gradients reach each part as if its rows were all there are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivcheck.user.batches import mapped


def part(value: Any, number: int, count: int, rows: int | None = None) -> Any:
    """One of equal parts of every tensor that has `rows` rows, or of all whose rows can be cut, in memory of its own."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] % count == 0 and rows in (None, tensor.shape[0])
        return tensor.chunk(count)[number].clone() if fits and count > 1 else tensor

    return mapped(value, cut)


def num_rows(value: Any) -> int | None:
    """Rows of the first tensor that has any; None if there is none."""
    found: list[int] = []
    mapped(value, lambda tensor: found.extend(tensor.shape[:1]) or tensor)  # type: ignore[func-returns-value]
    return found[0] if found else None


def joined(values: Sequence[Any]) -> Any:
    """The same structure with tensors of all rows; numbers are means, and what is no tensor is that of the first part."""
    return combined(values, _Joined.apply)


def combined(values: Sequence[Any], combine: Callable[..., torch.Tensor]) -> Any:
    """The structure that all values have, of the same types, with one tensor made of each group that lies in the same place."""
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
    """Rows one after the other, or the mean of numbers, whose gradient each part gets times the number of parts."""

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
    """The mean or the sum of losses of parts, unrounded, whose gradient is handed to each part times a factor."""

    @staticmethod
    def forward(ctx: Any, share: float, factor: float, *losses: torch.Tensor) -> torch.Tensor:
        """The sum times `share`."""
        ctx.factor, ctx.kinds = factor, [loss.dtype for loss in losses]
        return torch.stack([loss.double() for loss in losses]).sum() * share

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradient times the factor, in the type of each loss."""
        return None, None, *((gradients[0] * ctx.factor).to(kind) for kind in ctx.kinds)
