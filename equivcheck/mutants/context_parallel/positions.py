"""Context-parallel shards with wrong positions, masks or labels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from equivcheck.mutants.context_parallel.sites import (
    CONTEXT_PARALLEL,
    attentions,
    has_attention,
    is_causal,
    is_reordered,
    is_sharded,
    ranks_of,
)
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of
from equivcheck.mutants.tokens.needs import change_batches, has_loss, learns_positions
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Attention, AttentionExchange, Scenario
from equivcheck.scenario.mesh import CP
from equivcheck.training.documents import places_in_documents
from equivcheck.training.layers.attention.module import AttentionModule, attention, rotate
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def _turns(layer: Attention) -> bool:
    return layer.rotary


def _has_long_parts(scenario: Scenario) -> bool:
    return (scenario.training.model.length or 1) > scenario.layout.mesh.size(CP)


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(_turns), causes=(Cause.POSITIONS,))
def rotary_positions_of_own_part(setup: Setup) -> None:
    """Bug: rotary positions restart at 0 on each context-parallel rank."""
    for module in attentions(setup, _turns):
        module.with_rotary = partial(_place_from_start, module)  # type: ignore[method-assign]


def _place_from_start(module: AttentionModule, values: torch.Tensor) -> torch.Tensor:
    return rotate(values, places_in_documents(torch.arange(values.shape[-2]), module.document_length))


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(is_sharded, learns_positions), causes=(Cause.POSITIONS,))
def learned_positions_of_own_part(setup: Setup) -> None:
    """Bug: learned positions restart at 0 on each context-parallel rank."""
    module = setup.model.positions
    if ranks_of(setup) is not None and isinstance(module, nn.Embedding):
        length = setup.training.model.document_length
        module.register_forward_pre_hook(
            lambda _module, inputs: (places_in_documents(torch.arange(len(inputs[0])), length),), prepend=True
        )


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(is_reordered, has_attention(is_causal)), causes=(Cause.ATTENTION_MASK,))
def causal_mask_by_order_of_ranks(setup: Setup) -> None:
    """Bug: the causal mask assumes contiguous shards, although ranks hold a head and a tail chunk."""
    ranks = ranks_of(setup)
    for module in attentions(setup, is_causal):
        assert ranks is not None, "attentions() yields nothing without context parallelism"
        order = torch.cat(ranks.parts)
        _mask_by(module, torch.empty_like(order).index_copy(0, order, torch.arange(len(order))))


def _mask_by(module: AttentionModule, places: torch.Tensor) -> None:
    """Mask causally by `places` instead of positions."""
    later = places > places[:, None]
    module.unseen = lambda queries, keys: later[queries][:, keys]  # type: ignore[method-assign]
    module.attend = lambda query, key, value: attention(query, key, value, later)  # type: ignore[method-assign]


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(is_causal, AttentionExchange.GATHER), causes=(Cause.ATTENTION_MASK,))
def causal_mask_counted_in_own_part(setup: Setup) -> None:
    """Bug: the causal mask counts queries from each shard's start, but keys from the sequence's start."""
    for module in attentions(setup, is_causal):
        module.unseen = _from_own_start  # type: ignore[method-assign]


def _from_own_start(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return keys > torch.arange(len(queries))[:, None]


@fault(layouts=CONTEXT_PARALLEL, applies=has_attention(is_causal, AttentionExchange.RING), causes=(Cause.ATTENTION_MASK,))
def ring_blocks_masked_as_own(setup: Setup) -> None:
    """Bug: Ring attention applies each rank's own causal mask to every block."""
    for module in attentions(setup, is_causal):
        module.unseen = _as_in_own_block  # type: ignore[method-assign]


def _as_in_own_block(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(keys)) > torch.arange(len(queries))[:, None]


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(is_sharded, has_loss(), _has_long_parts), causes=(Cause.ANOTHER_LABEL,))
def labels_shifted_after_split(setup: Setup) -> None:
    """Bug: labels are shifted within each context-parallel shard, so they wrap around at its end."""
    if ranks_of(setup) is not None:
        inner, dim = setup.take, 1 - setup.training.data.batch_dim

        def take(batch: Batch) -> Batch:
            taken = inner(batch)
            return replace(taken, targets=taken.targets.roll(-1, dim))

        setup.take = take


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(is_reordered, has_loss()), causes=(Cause.ANOTHER_LABEL,))
def labels_split_contiguously(setup: Setup) -> None:
    """Bug: labels are split into contiguous shards, although ranks hold a head and a tail chunk."""
    ranks = ranks_of(setup)
    if ranks is not None:
        move = partial(_laid, torch.cat(ranks.parts), 1 - setup.training.data.batch_dim)
        change_batches(setup, lambda batches: [replace(batch, targets=move(batch.targets)) for batch in batches])


def _laid(order: torch.Tensor, dim: int, values: torch.Tensor) -> torch.Tensor:
    """Move contiguous values to the ranks' positions."""
    return torch.empty_like(values).index_copy(dim, order, values)
