"""Differentiable exchanges between the ranks of context parallelism. Values have shape (..., positions, width).

`Gather` collects all positions on each rank. `ToHeads` and `ToPositions` are the all-to-alls of DeepSpeed-Ulysses
(https://arxiv.org/abs/2309.14509): from some positions of all heads to all positions of some heads, and back. Heads are exchanged
in units of one key-value head and its query heads: (rows, units, heads of each, positions, width). A rank may have no unit.
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
    """A rank among those that share out the positions of sequences."""

    group: ProcessGroup
    """All of them."""
    index: int
    """This rank's place."""
    parts: tuple[torch.Tensor, ...]
    """The positions of each of them, in the order in which it has them."""

    @property
    def own(self) -> torch.Tensor:
        """The positions of this rank."""
        return self.parts[self.index]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Positions of all ranks together."""
        return sum(map(len, self.parts))

    @property
    def longest(self) -> int:
        """Positions of the rank that has most."""
        return max(map(len, self.parts))

    def slots(self) -> torch.Tensor:
        """Where each position of a sequence lies among parts that are padded to the longest, shape (length,)."""
        found = torch.empty(self.length, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            found[part] = rank * self.longest + torch.arange(len(part))
        return found


class Gather(torch.autograd.Function):
    """Values of all positions, from those of each rank's own; backward adds up what all ranks have for this rank's own."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Gather, padded to the longest part, and put in order.

        Compiled autograd needs the indices of backward among what is saved for it (torch 2.13: "list index out of range").
        """
        ctx.ranks = ranks
        own = padded(values, ranks.longest).movedim(-2, 0).contiguous()
        gathered = waited(collectives.all_gather_tensor(own, 0, ranks.group))
        ctx.save_for_backward(slots := ranks.slots())
        return gathered.index_select(0, slots).movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Reduce and scatter."""
        ranks, gradient = ctx.ranks, gradients[0].movedim(-2, 0)
        padded = gradient.new_zeros((ranks.size * ranks.longest, *gradient.shape[1:])).index_copy(
            0, ctx.saved_tensors[0], gradient
        )
        own = waited(collectives.reduce_scatter_tensor(padded, "sum", 0, ranks.group))
        return own.narrow(0, 0, len(ranks.own)).movedim(0, -2), None


def padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros after the last position, up to a length."""
    missing = length - values.shape[-2]
    return functional.pad(values, (0, 0, 0, missing)) if missing else values.contiguous()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective returns, once it is there."""
    wait: Any = collectives.wait_tensor
    found: torch.Tensor = wait(tensor)
    return found


def to_heads(values: torch.Tensor, ranks: PositionRanks, order: torch.Tensor) -> torch.Tensor:
    """All positions of this rank's units, from this rank's positions of all units; `order` has those of all ranks in turn."""
    rows, _, count, _, width = values.shape
    shares = chunk_sizes(values.shape[1], ranks.size)
    shapes = [(rows, shares[ranks.index], count, len(part), width) for part in ranks.parts]
    found = torch.cat(exchanged(torch.split(values, list(shares), 1), shapes, ranks), -2)
    return torch.empty_like(found).index_copy(-2, order, found)


def to_positions(values: torch.Tensor, units: int, ranks: PositionRanks, order: torch.Tensor) -> torch.Tensor:
    """This rank's positions of all units, from all positions of this rank's."""
    rows, _, count, _, width = values.shape
    shapes = [(rows, share, count, len(ranks.own), width) for share in chunk_sizes(units, ranks.size)]
    parts = torch.split(values.index_select(-2, order), list(map(len, ranks.parts)), -2)
    return torch.cat(exchanged(parts, shapes, ranks), 1)


def exchanged(sent: Iterable[torch.Tensor], shapes: list[Any], ranks: PositionRanks) -> list[torch.Tensor]:
    """What each rank has sent to this one, in those shapes."""
    flat = [each.reshape(-1) for each in sent]
    sizes = [math.prod(shape) for shape in shapes]
    received = waited(collectives.all_to_all_single(torch.cat(flat), sizes, [each.numel() for each in flat], ranks.group))
    return [each.view(shape) for each, shape in zip(torch.split(received, sizes), shapes, strict=True)]


class ToHeads(torch.autograd.Function):
    """`to_heads`; gradients go back by `to_positions`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Share out units."""
        ctx.ranks, ctx.units = ranks, values.shape[1]
        ctx.save_for_backward(order := torch.cat(ranks.parts))
        return to_heads(values, ranks, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Share out positions."""
        return to_positions(gradients[0], ctx.units, ctx.ranks, *ctx.saved_tensors), None


class ToPositions(torch.autograd.Function):
    """`to_positions`; gradients go back by `to_heads`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, units: int, ranks: PositionRanks) -> torch.Tensor:
        """Share out positions."""
        ctx.ranks = ranks
        ctx.save_for_backward(order := torch.cat(ranks.parts))
        return to_positions(values, units, ranks, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Share out units."""
        return to_heads(gradients[0], ctx.ranks, *ctx.saved_tensors), None, None
