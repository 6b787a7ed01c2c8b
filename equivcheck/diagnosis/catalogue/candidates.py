"""All counterfactuals, most specific first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.diagnosis.catalogue.accumulation import wrong_accumulations
from equivcheck.diagnosis.catalogue.clipping import wrong_clippings
from equivcheck.diagnosis.catalogue.context_parallel.attention import wrong_sequence_attention
from equivcheck.diagnosis.catalogue.context_parallel.sums import wrong_shard_sums
from equivcheck.diagnosis.catalogue.counterfactual import Counterfactual
from equivcheck.diagnosis.catalogue.experts.balance import wrong_balances
from equivcheck.diagnosis.catalogue.experts.exchange import wrong_exchanges
from equivcheck.diagnosis.catalogue.experts.partial_sums import wrong_partial_sums
from equivcheck.diagnosis.catalogue.experts.routing import dropped_rows, wrong_experts
from equivcheck.diagnosis.catalogue.initial_values import wrong_initial_values
from equivcheck.diagnosis.catalogue.optimizer_settings import wrong_optimizers
from equivcheck.diagnosis.catalogue.order import wrong_orders
from equivcheck.diagnosis.catalogue.precision import wrong_parameter_precision, wrong_reduction_precision
from equivcheck.diagnosis.catalogue.reduction import constant_ratios, wrong_factors, wrong_reductions
from equivcheck.diagnosis.catalogue.rows import wrong_rows
from equivcheck.diagnosis.catalogue.shards import local_statistics, state_of_other_ranks, wrong_gradient_shards
from equivcheck.diagnosis.catalogue.shared_weights import wrong_sharing
from equivcheck.diagnosis.catalogue.tensor_parallel import wrong_tensor_parallelism
from equivcheck.diagnosis.catalogue.tokens.attention import wrong_attention, wrong_keys_and_values
from equivcheck.diagnosis.catalogue.tokens.embeddings import wrong_embeddings
from equivcheck.diagnosis.catalogue.tokens.labels import wrong_labels
from equivcheck.diagnosis.catalogue.tokens.vocabulary import wrong_vocabularies
from equivcheck.diagnosis.catalogue.updates import lost_state, skipped_updates, stale_values
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.worlds.trace.differences import Phase

_COMPUTED = (Phase.LOSS, Phase.GRADIENT)
_UPDATED = (Phase.UPDATE, Phase.STATE)

CATALOGUE: tuple[tuple[Callable[[DivergedRun], Iterator[Counterfactual]], tuple[Phase, ...]], ...] = (
    (wrong_initial_values, (*_COMPUTED, *_UPDATED, Phase.BUFFER)),
    (wrong_labels, _COMPUTED),
    (wrong_keys_and_values, _COMPUTED),
    (wrong_embeddings, _COMPUTED),
    (wrong_experts, _COMPUTED),
    (wrong_balances, _COMPUTED),
    (wrong_exchanges, _COMPUTED),
    (wrong_partial_sums, _COMPUTED),
    (wrong_sequence_attention, _COMPUTED),
    (wrong_shard_sums, _COMPUTED),
    (wrong_reductions, _COMPUTED),
    (wrong_tensor_parallelism, _COMPUTED),
    (wrong_vocabularies, _COMPUTED),
    (wrong_attention, _COMPUTED),
    (wrong_orders, _COMPUTED),
    (wrong_gradient_shards, _COMPUTED),
    (wrong_factors, _COMPUTED),
    (wrong_rows, _COMPUTED),
    (wrong_accumulations, _COMPUTED),
    (wrong_clippings, (Phase.GRADIENT, Phase.CLIPPING)),
    (dropped_rows, _COMPUTED),
    (wrong_reduction_precision, _COMPUTED),
    (wrong_sharing, _COMPUTED),
    (constant_ratios, (*_COMPUTED, Phase.CLIPPING)),
    (stale_values, (*_COMPUTED, *_UPDATED)),
    (wrong_parameter_precision, (*_COMPUTED, *_UPDATED)),
    (local_statistics, _UPDATED),
    (skipped_updates, _UPDATED),
    (lost_state, _UPDATED),
    (state_of_other_ranks, _UPDATED),
    (wrong_optimizers, _UPDATED),
)
"""Functions that yield counterfactuals, each with the phases it applies to. Order matters: the first exact fit is reported."""


def candidates(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Counterfactuals for a run, in the order in which they are tried."""
    for wrong, phases in CATALOGUE:
        if diverged.first.phase in phases:
            yield from wrong(diverged)
