"""Differentiable activation redistributions over an axis, called regions in Megatron.

The functions use functional collectives, whose own backward supports neither unequal shards nor gradients with another placement
than the values. Unequal shards are padded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives

from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import Redistribution


@dataclass(slots=True, kw_only=True)
class AxisRanks:
    """The ranks along one mesh axis, as seen from one rank, with their collectives. `rows` is set again for each microbatch."""

    group: ProcessGroup
    """Process group of the ranks."""
    size: int
    """Number of ranks."""
    index: int
    """This rank's index along the axis."""
    rows: int = 0
    """Number of rows, or positions if rows are sequences, in the current microbatch over all ranks."""

    def move(self, values: torch.Tensor, route: Redistribution) -> torch.Tensor:
        """Redistribute an activation as `route` says. Backward redistributes the gradient."""
        if self.size == 1 or not route.moves:
            return values
        moved: torch.Tensor = Redistribute.apply(values, self, route)  # type: ignore[no-untyped-call]
        return moved

    def copy_to_region(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a replicated parameter unchanged; backward sums its gradient over ranks.

        Use it if ranks apply the parameter to different values.
        """
        if self.size == 1:
            return parameter
        used: torch.Tensor = CopyToRegion.apply(parameter, self)  # type: ignore[no-untyped-call]
        return used

    def bias_on_first_rank(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a replicated parameter on the first rank and zeros on the others, so that a sum over ranks contains it once.

        All ranks already have the sum's gradient, so backward communicates nothing.
        """
        if self.size == 1:
            return parameter
        addend: torch.Tensor = BiasOnFirstRank.apply(parameter, self)  # type: ignore[no-untyped-call]
        return addend

    def first_index(self, size: int) -> int:
        """Return the first index of this rank's shard of a dim with `size` elements."""
        return min(chunk_size(size, self.size) * self.index, size)

    def own_part(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a tensor along `dim`, as a view."""
        size = values.shape[dim]
        return values.narrow(dim, self.first_index(size), chunk_sizes(size, self.size)[self.index])

    def own_parameter(self, parameter: torch.Tensor, dim: int | None) -> nn.Parameter:
        """Return this rank's shard of a parameter along a dim; the full parameter if `dim` is None."""
        assert isinstance(parameter, nn.Parameter), type(parameter)
        if dim is None or self.size == 1:
            return parameter
        return nn.Parameter(self.own_part(parameter.detach(), dim).clone(), requires_grad=parameter.requires_grad)

    def redistribute(
        self, values: torch.Tensor, source: ActivationPlacement, target: ActivationPlacement, extents: tuple[int, int]
    ) -> torch.Tensor:
        """Redistribute an activation from placement `source` to `target`, without autograd.

        `extents` are the numbers of rows and features over all ranks.
        """
        if source is target:
            return values
        if source is ActivationPlacement.PARTIAL:
            if target is ActivationPlacement.REPLICATED:
                return self.sum(values)
            return self._sum_of_part(values, dim_of(target))
        if source is not ActivationPlacement.REPLICATED:
            values = self._gathered(values, dim_of(source), extents[dim_of(source)])
        return values if target is ActivationPlacement.REPLICATED else self.own_part(values, dim_of(target))

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over ranks, without autograd."""
        return wait_for(collectives.all_reduce(addend.contiguous(), "sum", self.group))

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of a tensor over ranks, without autograd."""
        return wait_for(collectives.all_reduce(values.contiguous(), "max", self.group))

    def _gathered(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        rows = padded(part.movedim(dim, 0), chunk_size(extent, self.size))
        gathered = wait_for(collectives.all_gather_tensor(rows, 0, self.group))
        return gathered.narrow(0, 0, extent).movedim(0, dim)

    def _sum_of_part(self, addend: torch.Tensor, dim: int) -> torch.Tensor:
        extent = addend.shape[dim]
        rows = padded(addend.movedim(dim, 0), chunk_size(extent, self.size) * self.size)
        part = wait_for(collectives.reduce_scatter_tensor(rows, "sum", 0, self.group))
        return part.narrow(0, 0, chunk_sizes(extent, self.size)[self.index]).movedim(0, dim)


class Redistribute(torch.autograd.Function):
    """Autograd function that redistributes an activation and its gradient.

    Every rank calls forward and backward, even with an empty shard. Both return contiguous tensors, because a pipeline may send
    them. Forward does not return a view, because zero-bubble schedules detach the activation in place.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: AxisRanks, route: Redistribution) -> torch.Tensor:
        """Redistribute the values."""
        ctx.ranks, ctx.route, ctx.extents = ranks, route, (ranks.rows, route.features)
        moved = ranks.redistribute(values, route.source, route.target, ctx.extents)
        return moved.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Redistribute the gradient."""
        route = ctx.route
        moved = ctx.ranks.redistribute(gradients[0], route.gradient_source, route.gradient_target, ctx.extents)
        return moved.contiguous(), None, None


class CopyToRegion(torch.autograd.Function):
    """Autograd function: identity in forward, sum over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ranks: AxisRanks) -> torch.Tensor:
        """Return the parameter."""
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradient over ranks."""
        return ctx.ranks.sum(gradients[0]), None


class BiasOnFirstRank(torch.autograd.Function):
    """Autograd function: returns the parameter on the first rank and zeros on others. Backward is the identity."""

    @staticmethod
    def forward(_ctx: Any, parameter: torch.Tensor, ranks: AxisRanks) -> torch.Tensor:
        """Return the parameter on the first rank, and zeros on other ranks."""
        return torch.zeros_like(parameter) if ranks.index else parameter.view_as(parameter)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient unchanged."""
        return gradients[0], None


def dim_of(lies: ActivationPlacement) -> int:
    """Return the sharded dim of an activation, counted from the end: -2 for rows or positions, -1 for features."""
    return -2 if lies is ActivationPlacement.ROWS else -1


def padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Pad a tensor with zeros along dim 0, up to `length` rows."""
    missing = length - rows.shape[0]
    # Not functional.pad(), because on torch 2.9 it refuses tensors whose other dims are empty.
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective and return its result."""
    wait: Any = collectives.wait_tensor
    found: torch.Tensor = wait(tensor)
    return found
