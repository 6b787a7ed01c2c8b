"""From some positions of all heads to all positions of some heads, and back, by one all-to-all.

As in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). What is shared out is units of heads: one of key and value with
those of the query that look through it. Values are (rows, units, heads of each, positions, width). A rank may have no unit.
Compiled autograd needs indices of a backward among what is saved for it (torch 2.13: "list index out of range").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives

from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.parallelisms.context_parallel.ranks import PositionRanks, waited


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
