"""From some positions of all heads to all positions of some heads, and back, by one all-to-all.

As in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). What is shared out is units of heads: one of key and value with those of
the query that look through it. Values are (rows, units, heads of each, positions, width). A rank may have no unit at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives

from equivcheck.layouts.partition import chunk_sizes
from equivcheck.parallelisms.context_parallel.ranks import PositionRanks, waited


def to_heads(values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
    """All positions, in order, of this rank's units, from this rank's positions of all units."""
    rows, units, count, own, width = values.shape
    shares = chunk_sizes(units, ranks.size)
    each, kept = rows * count * width, shares[ranks.index]
    received = _exchanged(
        values.split(shares, 1), [kept * len(part) * each for part in ranks.parts], [share * own * each for share in shares], ranks
    )
    parts = [flat.view(rows, kept, count, len(part), width) for flat, part in zip(received, ranks.parts, strict=True)]
    found = torch.cat(parts, -2)
    return torch.empty_like(found).index_copy(-2, torch.cat(ranks.parts), found)


def to_positions(values: torch.Tensor, units: int, ranks: PositionRanks) -> torch.Tensor:
    """This rank's positions of all units, from all positions of this rank's."""
    rows, kept, count, _, width = values.shape
    shares, own = chunk_sizes(units, ranks.size), len(ranks.own)
    each = rows * count * width
    sent = [values.index_select(-2, part) for part in ranks.parts]
    received = _exchanged(
        sent, [share * own * each for share in shares], [kept * len(part) * each for part in ranks.parts], ranks
    )
    parts = [flat.view(rows, share, count, own, width) for flat, share in zip(received, shares, strict=True)]
    return torch.cat(parts, 1)


def _exchanged(
    sent: Any, received_sizes: list[int], sent_sizes: list[int], ranks: PositionRanks
) -> tuple[torch.Tensor, ...]:
    """What each rank has sent, flat."""
    flat = torch.cat([each.reshape(-1) for each in sent])
    received = waited(collectives.all_to_all_single(flat, received_sizes, sent_sizes, ranks.group))
    return received.split(received_sizes)


class ToHeads(torch.autograd.Function):
    """`to_heads`; gradients go back by `to_positions`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Share out units."""
        ctx.ranks, ctx.units = ranks, values.shape[1]
        return to_heads(values, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Share out positions."""
        return to_positions(gradients[0], ctx.units, ctx.ranks), None


class ToPositions(torch.autograd.Function):
    """`to_positions`; gradients go back by `to_heads`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, units: int, ranks: PositionRanks) -> torch.Tensor:
        """Share out positions."""
        ctx.ranks = ranks
        return to_positions(values, units, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Share out units."""
        return to_heads(gradients[0], ctx.ranks), None, None
