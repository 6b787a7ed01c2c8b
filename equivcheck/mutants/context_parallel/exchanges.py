"""Attention over context-parallel shards with missing, reordered or detached keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.parallelisms.context_parallel.ranks import Gather, PositionRanks
from equivcheck.layouts.parallelisms.context_parallel.sequences import GatheredSequence, ShardedSequence, UlyssesSequence
from equivcheck.mutants.context_parallel.sites import (
    CONTEXT_PARALLEL,
    attentions,
    exchange_with,
    has_attention,
    is_causal,
    is_reordered,
    ranks_of,
)
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Attention, AttentionExchange
from equivcheck.training.layers.sequence import AttentionHooks
from equivcheck.training.setup import Setup

Unseen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Mask for the keys that each query does not see, given their positions; None if each query sees all keys."""


def _has_groups(layer: Attention) -> bool:
    return layer.num_kv_heads > 1


def _gathered(ranks: PositionRanks, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys and values for all positions, stacked."""
    found: torch.Tensor = Gather.apply(torch.stack((key, value)), ranks)  # type: ignore[no-untyped-call]
    return found


def _found(
    attention: AttentionHooks, query: torch.Tensor, keys_values: torch.Tensor, unseen: torch.Tensor | None
) -> torch.Tensor:
    keys, values = keys_values.unbind()
    return attention.attend_from(query, attention.repeat_kv_heads(keys), attention.repeat_kv_heads(values), unseen)


class _OwnKeysOnly(ShardedSequence):
    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        own = self.ranks.own
        return attention.attend_from(
            query, attention.repeat_kv_heads(key), attention.repeat_kv_heads(value), attention.unseen(own, own)
        )


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(), causes=(Cause.ATTENTION_MASK,))
def attention_to_own_positions_only(setup: Setup) -> None:
    """Bug: queries attend to their own rank's keys only, because keys and values are not exchanged."""
    exchange_with(setup, _OwnKeysOnly)


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(exchange=AttentionExchange.RING), causes=(Cause.ATTENTION_MASK,))
def ring_ends_before_last_block(setup: Setup) -> None:
    """Bug: Ring attention stops one step early, so the last block is never seen."""
    ranks = ranks_of(setup)
    for module in attentions(setup):
        assert ranks is not None, "attentions() yields nothing without context parallelism"
        last = ranks.parts[(ranks.index + 1) % ranks.size]
        module.unseen = partial(_none_of, last, module.unseen)  # type: ignore[method-assign]


def _none_of(last: torch.Tensor, unseen: Unseen, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    if torch.equal(keys, last):
        return torch.ones(len(queries), len(keys), dtype=torch.bool)
    return unseen(queries, keys)


class _NeverRescaled(ShardedSequence):
    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (attention.repeat_kv_heads(each) for each in _gathered(self.ranks, key, value).unbind())
        largest = query.new_full((*query.shape[:-1], 1), -torch.inf)
        total, found = torch.zeros_like(largest), torch.zeros_like(query)
        for turn in range(self.ranks.size):
            block = self.ranks.parts[(self.ranks.index - turn) % self.ranks.size]
            if len(block):
                scores = query @ keys[..., block, :].transpose(-1, -2) / query.shape[-1] ** 0.5
                unseen = attention.unseen(self.ranks.own, block)
                scores = scores if unseen is None else scores.masked_fill(unseen, -torch.inf)
                largest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
                weights = (scores - largest).exp()
                total, found = total + weights.sum(-1, keepdim=True), found + weights @ values[..., block, :]
        return found / total


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(exchange=AttentionExchange.RING), causes=(Cause.SOFTMAX_OF_PART,))
def ring_blocks_not_rescaled(setup: Setup) -> None:
    """Bug: Ring attention does not rescale earlier blocks if a later block has a larger score."""
    exchange_with(setup, _NeverRescaled)


class _LearningFrom(ShardedSequence):
    """Bug: keys and values get gradients from one rank's queries only; `before` is the distance to this rank."""

    before: int

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        gathered = _gathered(self.ranks, key, value)
        learning = self.ranks.parts[(self.ranks.index + self.before) % self.ranks.size]
        kept = gathered.detach().index_copy(-2, learning, gathered[..., learning, :])
        return _found(attention, query, kept, attention.unseen(self.ranks.own, torch.arange(self.ranks.length)))


class _LearningFromOwn(_LearningFrom):
    before = 0


class _LearningFromBefore(_LearningFrom):
    before = 1


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(exchange=AttentionExchange.GATHER), causes=(Cause.KEY_VALUE_GRADIENT,))
def key_gradients_sliced_not_reduced(setup: Setup) -> None:
    """Bug: the backward of the key and value all-gather takes each rank's slice without summing over ranks."""
    exchange_with(setup, _LearningFromOwn)


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(exchange=AttentionExchange.RING), causes=(Cause.KEY_VALUE_GRADIENT,))
def ring_gradients_overwritten(setup: Setup) -> None:
    """Bug: Ring attention overwrites key and value gradients instead of accumulating them."""
    exchange_with(setup, _LearningFromBefore)


class _OtherHeads(UlyssesSequence):
    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        found = super().attend_from_local(attention, query, key, value)
        units = key.shape[-3]
        return found.roll(found.shape[1] // units * chunk_sizes(units, self.ranks.size)[0], 1)


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(_has_groups, AttentionExchange.ULYSSES), causes=(Cause.PERMUTED,))
def heads_returned_in_another_order(setup: Setup) -> None:
    """Bug: Ulysses attention returns heads in the wrong order: each rank's heads take the place of the next rank's heads."""
    exchange_with(setup, _OtherHeads)


class _InOrderOfRanks(GatheredSequence):
    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        gathered = _gathered(self.ranks, key, value).index_select(-2, torch.cat(self.ranks.parts))
        return _found(attention, query, gathered, attention.unseen(self.ranks.own, torch.arange(self.ranks.length)))


@fault(
    layouts=CONTEXT_PARALLEL,
    applies=all_of(is_reordered, has_attention(is_causal, AttentionExchange.GATHER)),
    causes=(Cause.ATTENTION_MASK,),
)
def keys_left_in_rank_order(setup: Setup) -> None:
    """Bug: gathered keys and values stay in rank order, although ranks hold a head and a tail chunk, so masks are wrong."""
    exchange_with(setup, _InOrderOfRanks)
