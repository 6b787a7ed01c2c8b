"""Differentiable exchanges between context-parallel ranks. Values have shape (..., positions, width).

`Gather` collects all positions on each rank. `ToHeads` and `ToPositions` are the all-to-alls in DeepSpeed-Ulysses
(https://arxiv.org/abs/2309.14509): from some positions with all heads to all positions with some heads, and back. A unit is one
key-value head with its query heads, and values then have shape (rows, units, heads per unit, positions, width). A rank may have
no unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch.distributed import ProcessGroup
from torch.nn import functional

from equivcheck.layouts.base.partition import chunk_sizes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PositionRanks:
    """The ranks that share sequences, as seen from one rank."""

    group: ProcessGroup
    """Process group."""
    index: int
    """This rank's index in the group."""
    parts: tuple[torch.Tensor, ...]
    """Positions on each rank, in local order."""

    @property
    def own(self) -> torch.Tensor:
        """Positions on this rank."""
        return self.parts[self.index]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Number of positions in a sequence, over all ranks."""
        return sum(map(len, self.parts))

    @property
    def longest(self) -> int:
        """Largest number of positions on any rank."""
        return max(map(len, self.parts))

    def slots(self) -> torch.Tensor:
        """Return the index of each position in the concatenation of all ranks' padded shards. The tensor has shape (length,)."""
        found = torch.empty(self.length, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            found[part] = rank * self.longest + torch.arange(len(part))
        return found


class Gather(torch.autograd.Function):
    """Autograd function: all-gather along positions in forward, reduce-scatter of the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Gather the shards, padded to the longest one, and restore the order of positions."""
        ctx.ranks = ranks
        own = padded(values, ranks.longest).movedim(-2, 0).contiguous()
        gathered = wait_for(collectives.all_gather_tensor(own, 0, ranks.group))
        ctx.save_for_backward(slots := ranks.slots())
        return gathered.index_select(0, slots).movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients over ranks, and return this rank's shard of the sum."""
        ranks, gradient = ctx.ranks, gradients[0].movedim(-2, 0)
        padded = gradient.new_zeros((ranks.size * ranks.longest, *gradient.shape[1:])).index_copy(
            0, ctx.saved_tensors[0], gradient
        )
        own = wait_for(collectives.reduce_scatter_tensor(padded, "sum", 0, ranks.group))
        return own.narrow(0, 0, len(ranks.own)).movedim(0, -2), None


def padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """Pad values with zeros along the dim of positions, up to `length`."""
    missing = length - values.shape[-2]
    return functional.pad(values, (0, 0, 0, missing)) if missing else values.contiguous()


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective and return its result."""
    wait: Any = collectives.wait_tensor
    found: torch.Tensor = wait(tensor)
    return found


def to_heads(values: torch.Tensor, ranks: PositionRanks, order: torch.Tensor) -> torch.Tensor:
    """Exchange positions for heads by an all-to-all. `values` has all heads, at this rank's positions.

    The result has this rank's heads, at all positions.
    `order` contains the positions of all ranks, rank by rank.
    """
    rows, _, count, _, width = values.shape
    shares = chunk_sizes(values.shape[1], ranks.size)
    shapes = [(rows, shares[ranks.index], count, len(part), width) for part in ranks.parts]
    found = torch.cat(all_to_all_parts(torch.split(values, list(shares), 1), shapes, ranks), -2)
    return torch.empty_like(found).index_copy(-2, order, found)


def to_positions(values: torch.Tensor, units: int, ranks: PositionRanks, order: torch.Tensor) -> torch.Tensor:
    """Exchange heads for positions by an all-to-all. `values` has this rank's heads, at all positions.

    The result has all heads, at this rank's positions.
    `units` is the number of key-value heads on all ranks, and `order` contains the positions of all ranks, rank by rank.
    """
    rows, _, count, _, width = values.shape
    shapes = [(rows, share, count, len(ranks.own), width) for share in chunk_sizes(units, ranks.size)]
    parts = torch.split(values.index_select(-2, order), list(map(len, ranks.parts)), -2)
    return torch.cat(all_to_all_parts(parts, shapes, ranks), 1)


def all_to_all_parts(sent: Iterable[torch.Tensor], shapes: list[Any], ranks: PositionRanks) -> list[torch.Tensor]:
    """Send one tensor in `sent` to each rank, and return the received tensors with the given shapes."""
    flat = [each.reshape(-1) for each in sent]
    sizes = [math.prod(shape) for shape in shapes]
    received = wait_for(collectives.all_to_all_single(torch.cat(flat), sizes, [each.numel() for each in flat], ranks.group))
    return [each.view(shape) for each, shape in zip(torch.split(received, sizes), shapes, strict=True)]


class ToHeads(torch.autograd.Function):
    """Autograd function that exchanges positions for heads by `to_heads`. Its backward is `to_positions`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Return this rank's heads at all positions."""
        ctx.ranks, ctx.units = ranks, values.shape[1]
        ctx.save_for_backward(order := torch.cat(ranks.parts))
        return to_heads(values, ranks, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Exchange the gradients of heads for gradients of positions."""
        return to_positions(gradients[0], ctx.units, ctx.ranks, *ctx.saved_tensors), None


class ToPositions(torch.autograd.Function):
    """Autograd function that exchanges heads for positions by `to_positions`. Its backward is `to_heads`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, units: int, ranks: PositionRanks) -> torch.Tensor:
        """Return all heads at this rank's positions."""
        ctx.ranks = ranks
        ctx.save_for_backward(order := torch.cat(ranks.parts))
        return to_positions(values, units, ranks, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Exchange the gradients of positions for gradients of heads."""
        return to_heads(gradients[0], ctx.ranks, *ctx.saved_tensors), None, None
