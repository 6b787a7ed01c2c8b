"""Boundaries of packed documents that context-parallel ranks count from the start of their own shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.mutants.context_parallel.sites import (
    CONTEXT_PARALLEL,
    any_attention,
    attentions,
    has_attention,
    is_sharded,
    ranks_of,
)
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of
from equivcheck.mutants.tokens.documents import labels_tokens, move_boundaries, packs_documents
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import AttentionExchange, ContextParallel, Scenario
from equivcheck.scenario.mesh import CP
from equivcheck.training.documents import in_other_documents
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.setup import Setup


def _splits_documents(scenario: Scenario) -> bool:
    """Whether some rank's shard begins within a document."""
    length, documents = scenario.training.model.length or 1, scenario.training.model.document_length
    if documents is None or not packs_documents(scenario) or not is_sharded(scenario):
        return False
    found = [positions_of_ranks(each, length, scenario.layout.mesh.size(CP)) for each in scenario.layout.of(ContextParallel)]
    return any(
        position % documents != place % documents for parts in found for part in parts for place, position in enumerate(part)
    )


def _exchanges_blocks(scenario: Scenario) -> bool:
    exchanges = (AttentionExchange.GATHER, AttentionExchange.RING)
    return any(has_attention(any_attention, exchange)(scenario) for exchange in exchanges)


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(_splits_documents, _exchanges_blocks), causes=(Cause.ATTENTION_MASK,))
def documents_counted_in_own_part(setup: Setup) -> None:
    """Bug: attention counts documents from the start of each rank's shard, so masks between documents are wrong."""
    for module in attentions(setup):
        module.unseen = partial(_counted_in_part, module)  # type: ignore[method-assign]


def _counted_in_part(module: AttentionModule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    assert module.document_length is not None, "the mutant applies to packed documents only"
    # Gathered keys are the full sequence, whose index is their position.
    others = in_other_documents(torch.arange(len(queries)), torch.arange(len(keys)), module.document_length)
    return others | (keys > queries[:, None]) if module.layer.causal else others


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(_splits_documents, labels_tokens), causes=(Cause.ANOTHER_LABEL,))
def boundaries_of_labels_counted_in_own_part(setup: Setup) -> None:
    """Bug: each rank counts document boundaries from the start of its own shard, so the wrong labels are ignored."""
    ranks, length = ranks_of(setup), setup.training.model.document_length
    if ranks is not None and length is not None:
        boundaries = torch.zeros(ranks.length, dtype=torch.bool)
        boundaries[[position for part in ranks.parts for position in _last_places(part, length)]] = True
        move_boundaries(setup, boundaries)


def _last_places(part: torch.Tensor, length: int) -> Iterator[int]:
    """Positions at the end of documents, counted from the start of a shard, except the shard's last position."""
    return (int(position) for position in part[:-1][length - 1 :: length])
