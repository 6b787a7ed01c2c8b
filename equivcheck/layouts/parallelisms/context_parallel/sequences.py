"""How attention reads the positions of other ranks: by gathering them, by exchanging heads, or by passing them round a ring.

Ring attention (https://arxiv.org/abs/2310.01889) combines the softmax block by block. In backward, keys and values go round once
more together with their gradients, and the gradients take one more turn to reach their rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from equivcheck.layouts.parallelisms.context_parallel.ranks import Gather, PositionRanks, ToHeads, ToPositions, padded
from equivcheck.scenario import Exchange
from equivcheck.training.layers.sequence import Looks, Sequence


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ring:
    """One pass of a layer's keys and values."""

    ranks: PositionRanks
    """Those that have a part of the positions."""
    looks: Looks
    """The layer."""

    def pass_on(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a block to the next rank; returns what waits for that of the one before."""
        ranks, arriving = self.ranks, torch.empty_like(block)
        after, before = (dist.get_global_rank(ranks.group, (ranks.index + step) % ranks.size) for step in (1, -1))
        messages = (dist.P2POp(dist.isend, block, after, ranks.group), dist.P2POp(dist.irecv, arriving, before, ranks.group))
        works = dist.batch_isend_irecv(list(messages))

        def arrived() -> torch.Tensor:
            for work in works:
                work.wait()
            return arriving

        return arrived

    def origin(self, turn: int) -> torch.Tensor:
        """The positions of the block that is here at a turn."""
        return self.ranks.parts[(self.ranks.index - turn) % self.ranks.size]

    def scores(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of queries that are here by keys of some positions, for each head of the query."""
        scores = query @ self.looks.grouped(key).transpose(-1, -2) / math.sqrt(query.shape[-1])
        unseen = self.looks.unseen(self.ranks.own, positions)
        return scores if unseen is None else scores.masked_fill(unseen, -torch.inf)

    def of_heads(self, values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of keys or values, from that of what each head of the query looks at of them."""
        with torch.enable_grad():
            leaf = values.detach().requires_grad_()
            grouped = self.looks.grouped(leaf)
        return torch.autograd.grad(grouped, leaf, gradient)[0]


class BlockwiseSoftmax:
    """The values that queries find, weighed by the exponential of scores that come block by block.

    Sums are kept of exponentials less the largest score so far; the first block has a score for each query.
    """

    def __init__(self, query: torch.Tensor) -> None:
        self.largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
        self.total = torch.zeros_like(self.largest)
        self.found = torch.zeros_like(query)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Count another block."""
        if not scores.shape[-1]:
            return
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        self.rescale(largest)
        weights = (scores - largest).exp()
        self.total = self.total + weights.sum(-1, keepdim=True)
        self.found = self.found + weights @ values

    def rescale(self, largest: torch.Tensor) -> None:
        """Make what has been counted relative to another score."""
        factor = (self.largest - largest).exp()
        self.total, self.found, self.largest = self.total * factor, self.found * factor, largest


class RingAttention(torch.autograd.Function):
    """What the positions that are here find in all."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys_values: torch.Tensor, ring: Ring) -> torch.Tensor:
        """Look at each block as it comes by: (rows, heads, positions, width) for (2, rows, kv heads, positions, width)."""
        softmax, block = BlockwiseSoftmax(query), padded(keys_values, ring.ranks.longest)
        last = ring.ranks.size - 1
        for turn in range(last + 1):
            arrived = ring.pass_on(block) if turn < last else None
            positions = ring.origin(turn)
            key, value = block[..., : len(positions), :]
            softmax.add(ring.scores(query, key, positions), ring.looks.grouped(value))
            block = block if arrived is None else arrived()
        found = softmax.found / softmax.total
        ctx.ring = ring
        ctx.save_for_backward(query, keys_values, found, softmax.largest + softmax.total.log())
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Look at each block again, and add to its gradient, which comes with it."""
        ring, (query, keys_values, found, logarithm) = ctx.ring, ctx.saved_tensors
        of_found = gradients[0]
        inner = (of_found * found).sum(-1, keepdim=True)
        of_query, own = torch.zeros_like(query), padded(keys_values, ring.ranks.longest)
        block = torch.cat((own, torch.zeros_like(own)))
        for turn in range(ring.ranks.size):
            positions = ring.origin(turn)
            key, value, of_key, of_value = block[..., : len(positions), :]
            weights = (ring.scores(query, key, positions) - logarithm).exp()
            of_scores = weights * (of_found @ ring.looks.grouped(value).transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
            of_query += of_scores @ ring.looks.grouped(key)
            of_key += ring.of_heads(key, of_scores.transpose(-1, -2) @ query)
            of_value += ring.of_heads(value, weights.transpose(-1, -2) @ of_found)
            block = ring.pass_on(block if turn < ring.ranks.size - 1 else block[2:])()
        return of_query, block[..., : len(ring.ranks.own), :], None


class PartOfSequence(Sequence):
    """The positions of one rank."""

    def __init__(self, ranks: PositionRanks) -> None:
        self.ranks = ranks

    def positions(self, count: int, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - of the base class
        """Those of this rank."""
        return self.ranks.own.to(device)


class Gathered(PartOfSequence):
    """Keys and values of all positions come to every rank."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Gather keys and values at once, and look at all from the positions that are here."""
        gathered: torch.Tensor = Gather.apply(torch.stack((key, value)), self.ranks)  # type: ignore[no-untyped-call]
        keys, values = gathered.unbind()
        unseen = looks.unseen(self.ranks.own, torch.arange(self.ranks.length))
        return looks.attend_from(query, looks.grouped(keys), looks.grouped(values), unseen)


class SharedHeads(PartOfSequence):
    """Each rank looks with some of the heads, at whole sequences."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Exchange queries, keys and values at once for those of whole sequences, and what is found there back."""
        units = key.shape[-3]
        parts = [by_units_of(query, units), key.unsqueeze(2), value.unsqueeze(2)]
        whole: torch.Tensor = ToHeads.apply(torch.cat(parts, 2), self.ranks)  # type: ignore[no-untyped-call]
        queries, keys, values = torch.split(whole, [parts[0].shape[2], 1, 1], 2)
        found = looks.attend(queries.flatten(1, 2), looks.grouped(keys.squeeze(2)), looks.grouped(values.squeeze(2)))
        grouped = found.view(queries.shape)
        back: torch.Tensor = ToPositions.apply(grouped, units, self.ranks)  # type: ignore[no-untyped-call]
        return back.flatten(1, 2)


def by_units_of(query: torch.Tensor, units: int) -> torch.Tensor:
    """Heads of the query that look through one of key and value, side by side."""
    found: torch.Tensor = query.unflatten(1, (units, query.shape[1] // max(units, 1)))  # type: ignore[no-untyped-call]
    return found


class RoundTrips(PartOfSequence):
    """Keys and values go round all ranks."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Look at those of each rank in turn."""
        ring = Ring(ranks=self.ranks, looks=looks)
        found: torch.Tensor = RingAttention.apply(query, torch.stack((key, value)), ring)  # type: ignore[no-untyped-call]
        return found


SEQUENCES: dict[Exchange, type[PartOfSequence]] = {
    Exchange.GATHER: Gathered,
    Exchange.ULYSSES: SharedHeads,
    Exchange.RING: RoundTrips,
}
