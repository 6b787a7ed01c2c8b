"""How attention reads other ranks' positions: by gathering them, by exchanging heads, or by passing keys and values round a ring.

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
from equivcheck.scenario import AttentionExchange
from equivcheck.training.layers.sequence import AttentionHooks, Sequence


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ring:
    """Ring of ranks: each passes keys and values to the next rank, in one attention layer."""

    ranks: PositionRanks
    """Ranks in the ring."""
    attention: AttentionHooks
    """The attention module, which knows its mask and heads."""

    def pass_on(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a block to the next rank. Returns a function that waits for the previous rank's block."""
        ranks, arriving = self.ranks, torch.empty_like(block)
        after, before = (dist.get_global_rank(ranks.group, (ranks.index + step) % ranks.size) for step in (1, -1))
        messages = (dist.P2POp(dist.isend, block, after, ranks.group), dist.P2POp(dist.irecv, arriving, before, ranks.group))
        works = dist.batch_isend_irecv(list(messages))

        def wait_for_block() -> torch.Tensor:
            for work in works:
                work.wait()
            return arriving

        return wait_for_block

    def origin(self, turn: int) -> torch.Tensor:
        """Return the positions in this rank's block after `turn` sends."""
        return self.ranks.parts[(self.ranks.index - turn) % self.ranks.size]

    def scores(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention scores between this rank's queries and the keys at `positions`, for each query head."""
        scores = query @ self.attention.repeat_kv_heads(key).transpose(-1, -2) / math.sqrt(query.shape[-1])
        unseen = self.attention.unseen(self.ranks.own, positions)
        return scores if unseen is None else scores.masked_fill(unseen, -torch.inf)

    def of_heads(self, values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient for keys or values over query heads with the same key-value head."""
        with torch.enable_grad():
            leaf = values.detach().requires_grad_()
            grouped = self.attention.repeat_kv_heads(leaf)
        return torch.autograd.grad(grouped, leaf, gradient)[0]


class BlockwiseSoftmax:
    """Softmax-weighted sum of values, updated one block of keys and values at a time, as in ring attention.

    Sums are stored relative to the largest score so far. The first block must have a score for each query.
    """

    def __init__(self, query: torch.Tensor) -> None:
        self.largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
        self.total = torch.zeros_like(self.largest)
        self.found = torch.zeros_like(query)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Add a block of keys to the sum, given its scores and values."""
        if not scores.shape[-1]:
            return
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        self.rescale(largest)
        weights = (scores - largest).exp()
        self.total = self.total + weights.sum(-1, keepdim=True)
        self.found = self.found + weights @ values

    def rescale(self, largest: torch.Tensor) -> None:
        """Make the sums relative to a new largest score."""
        factor = (self.largest - largest).exp()
        self.total, self.found, self.largest = self.total * factor, self.found * factor, largest


class RingAttention(torch.autograd.Function):
    """Autograd function for ring attention: keys and values pass around a ring of ranks."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys_values: torch.Tensor, ring: Ring) -> torch.Tensor:
        """Let queries attend to each rank's block in turn.

        `keys_values` has the shape (2, rows, key-value heads, positions, width).
        """
        softmax, block = BlockwiseSoftmax(query), padded(keys_values, ring.ranks.longest)
        last = ring.ranks.size - 1
        for turn in range(last + 1):
            arrived = ring.pass_on(block) if turn < last else None
            positions = ring.origin(turn)
            key, value = block[..., : len(positions), :]
            softmax.add(ring.scores(query, key, positions), ring.attention.repeat_kv_heads(value))
            block = block if arrived is None else arrived()
        found = softmax.found / softmax.total
        ctx.ring = ring
        ctx.save_for_backward(query, keys_values, found, softmax.largest + softmax.total.log())
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Pass keys and values around again, together with their gradients. Each rank adds its part to the gradients."""
        ring, (query, keys_values, found, logarithm) = ctx.ring, ctx.saved_tensors
        of_found = gradients[0]
        inner = (of_found * found).sum(-1, keepdim=True)
        of_query, own = torch.zeros_like(query), padded(keys_values, ring.ranks.longest)
        block = torch.cat((own, torch.zeros_like(own)))
        for turn in range(ring.ranks.size):
            positions = ring.origin(turn)
            key, value, of_key, of_value = block[..., : len(positions), :]
            weights = (ring.scores(query, key, positions) - logarithm).exp()
            of_scores = (
                weights
                * (of_found @ ring.attention.repeat_kv_heads(value).transpose(-1, -2) - inner)
                / math.sqrt(query.shape[-1])
            )
            of_query += of_scores @ ring.attention.repeat_kv_heads(key)
            of_key += ring.of_heads(key, of_scores.transpose(-1, -2) @ query)
            of_value += ring.of_heads(value, weights.transpose(-1, -2) @ of_found)
            block = ring.pass_on(block if turn < ring.ranks.size - 1 else block[2:])()
        return of_query, block[..., : len(ring.ranks.own), :], None


class ShardedSequence(Sequence):
    """Base class for sequences with only some positions on this rank. Subclasses let attention read the other positions."""

    def __init__(self, ranks: PositionRanks) -> None:
        self.ranks = ranks

    def positions(self, count: int, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - of the base class
        """Return the positions on this rank."""
        return self.ranks.own.to(device)


class GatheredSequence(ShardedSequence):
    """Sequence whose attention gathers keys and values from all ranks."""

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Gather keys and values from all ranks in one call, and let this rank's queries attend to them."""
        gathered: torch.Tensor = Gather.apply(torch.stack((key, value)), self.ranks)  # type: ignore[no-untyped-call]
        keys, values = gathered.unbind()
        unseen = attention.unseen(self.ranks.own, torch.arange(self.ranks.length))
        return attention.attend_from(query, attention.repeat_kv_heads(keys), attention.repeat_kv_heads(values), unseen)


class UlyssesSequence(ShardedSequence):
    """Sequence whose attention exchanges positions for heads, to attend over full sequences (DeepSpeed-Ulysses)."""

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Exchange positions for heads, attend over full sequences, and exchange back."""
        units = key.shape[-3]
        parts = [group_query_heads(query, units), key.unsqueeze(2), value.unsqueeze(2)]
        whole: torch.Tensor = ToHeads.apply(torch.cat(parts, 2), self.ranks)  # type: ignore[no-untyped-call]
        queries, keys, values = torch.split(whole, [parts[0].shape[2], 1, 1], 2)
        found = attention.attend(
            queries.flatten(1, 2), attention.repeat_kv_heads(keys.squeeze(2)), attention.repeat_kv_heads(values.squeeze(2))
        )
        grouped = found.view(queries.shape)
        back: torch.Tensor = ToPositions.apply(grouped, units, self.ranks)  # type: ignore[no-untyped-call]
        return back.flatten(1, 2)


def group_query_heads(query: torch.Tensor, units: int) -> torch.Tensor:
    """Group query heads by their key-value head: `units` groups along dim 1."""
    found: torch.Tensor = query.unflatten(1, (units, query.shape[1] // max(units, 1)))  # type: ignore[no-untyped-call]
    return found


class RingSequence(ShardedSequence):
    """Sequence whose attention passes keys and values around a ring of ranks."""

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Let this rank's queries attend to each rank's keys and values in turn."""
        ring = Ring(ranks=self.ranks, attention=attention)
        found: torch.Tensor = RingAttention.apply(query, torch.stack((key, value)), ring)  # type: ignore[no-untyped-call]
        return found


SEQUENCES: dict[AttentionExchange, type[ShardedSequence]] = {
    AttentionExchange.GATHER: GatheredSequence,
    AttentionExchange.ULYSSES: UlyssesSequence,
    AttentionExchange.RING: RingSequence,
}
