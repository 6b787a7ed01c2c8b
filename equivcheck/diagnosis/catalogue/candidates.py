"""All mistakes to try for a scenario, most specific first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.diagnosis.catalogue.accumulation import wrong_microbatches
from equivcheck.diagnosis.catalogue.chunks import wrong_chunks
from equivcheck.diagnosis.catalogue.clipping import unscaled_after_clipping, wrong_clippings_of_scenario
from equivcheck.diagnosis.catalogue.context_parallel.attention import wrong_sequence_attention
from equivcheck.diagnosis.catalogue.context_parallel.sums import wrong_shard_sums
from equivcheck.diagnosis.catalogue.experts.balance import wrong_balances
from equivcheck.diagnosis.catalogue.experts.exchange import wrong_exchanges
from equivcheck.diagnosis.catalogue.experts.groups import wrong_groups
from equivcheck.diagnosis.catalogue.experts.partial_sums import wrong_partial_sums
from equivcheck.diagnosis.catalogue.experts.router_bias import wrong_router_biases
from equivcheck.diagnosis.catalogue.experts.routing import dropped_rows, wrong_experts
from equivcheck.diagnosis.catalogue.order import wrong_orders
from equivcheck.diagnosis.catalogue.rows import wrong_rows
from equivcheck.diagnosis.catalogue.shared_weights import wrong_sharing
from equivcheck.diagnosis.catalogue.tensor_parallel import wrong_tensor_parallelism
from equivcheck.diagnosis.catalogue.tokens.attention import wrong_attention, wrong_keys_and_values
from equivcheck.diagnosis.catalogue.tokens.documents import wrong_documents
from equivcheck.diagnosis.catalogue.tokens.embeddings import wrong_embeddings
from equivcheck.diagnosis.catalogue.tokens.label_weights import wrong_label_weights
from equivcheck.diagnosis.catalogue.tokens.labels import wrong_labels, wrong_second_predictions
from equivcheck.diagnosis.catalogue.tokens.vocabulary import wrong_vocabularies
from equivcheck.diagnosis.catalogue.windows import wrong_windows
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import COMPUTED, UPDATED, Mistake, StepFacts
from equivcheck.diagnosis.mistakes.initial_values import wrong_start
from equivcheck.diagnosis.mistakes.local_statistics import local_statistics
from equivcheck.diagnosis.mistakes.microbatches import unzeroed_gradients, updates_in_microbatches, wrong_accumulations
from equivcheck.diagnosis.mistakes.precision import lower_precision
from equivcheck.diagnosis.mistakes.reductions import constant_ratios, wrong_factors, wrong_gradient_shards, wrong_reductions
from equivcheck.diagnosis.mistakes.settings import wrong_decays, wrong_settings
from equivcheck.diagnosis.mistakes.stale import stale_values
from equivcheck.diagnosis.mistakes.updates import wrong_updates
from equivcheck.scenario import ClipNorm
from equivcheck.worlds.trace.differences import Phase


def local_statistics_of_scenario(diverged: DivergedRun, facts: StepFacts) -> Iterator[Mistake]:
    """Yield the mistakes from `local_statistics`.

    Yields none for elementwise optimizers, because they compute no norms or means over a tensor.
    """
    if not diverged.training.optimizer.elementwise:
        yield from local_statistics(diverged, facts)


CATALOGUE: tuple[tuple[Callable[..., Iterator[Mistake]], tuple[Phase, ...]], ...] = (
    (wrong_start, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (wrong_windows, (*COMPUTED, *UPDATED)),
    (wrong_label_weights, COMPUTED),
    (wrong_documents, COMPUTED),
    (wrong_second_predictions, COMPUTED),
    (wrong_labels, COMPUTED),
    (wrong_keys_and_values, COMPUTED),
    (wrong_embeddings, COMPUTED),
    (wrong_experts, COMPUTED),
    (wrong_balances, COMPUTED),
    (wrong_router_biases, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (wrong_exchanges, COMPUTED),
    (wrong_groups, COMPUTED),
    (wrong_partial_sums, COMPUTED),
    (wrong_sequence_attention, COMPUTED),
    (wrong_shard_sums, COMPUTED),
    (wrong_reductions, COMPUTED),
    (wrong_tensor_parallelism, COMPUTED),
    (wrong_vocabularies, COMPUTED),
    (wrong_attention, COMPUTED),
    (wrong_orders, COMPUTED),
    (wrong_gradient_shards, COMPUTED),
    (wrong_factors, COMPUTED),
    (wrong_rows, COMPUTED),
    (wrong_chunks, COMPUTED),
    (wrong_microbatches, COMPUTED),
    (updates_in_microbatches, COMPUTED),
    (wrong_accumulations, COMPUTED),
    (unzeroed_gradients, COMPUTED),
    (wrong_clippings_of_scenario, (Phase.GRADIENT, Phase.CLIPPING)),
    (dropped_rows, COMPUTED),
    (wrong_sharing, COMPUTED),
    (constant_ratios, (*COMPUTED, Phase.CLIPPING)),
    (unscaled_after_clipping, COMPUTED),
    (stale_values, (*COMPUTED, *UPDATED)),
    (lower_precision, (*COMPUTED, *UPDATED)),
    (local_statistics_of_scenario, UPDATED),
    (wrong_settings, UPDATED),
    (wrong_decays, UPDATED),
    (wrong_updates, UPDATED),
)
"""Functions for kinds of mistakes, each with the phases that it applies to. Order matters: the first exact fit is reported."""

GENERAL = (
    wrong_reductions,
    wrong_factors,
    constant_ratios,
    wrong_gradient_shards,
    wrong_accumulations,
    unzeroed_gradients,
    wrong_microbatches,
    updates_in_microbatches,
    wrong_clippings_of_scenario,
    unscaled_after_clipping,
    stale_values,
    lower_precision,
    local_statistics_of_scenario,
    wrong_decays,
    wrong_settings,
    wrong_updates,
)
"""Functions with facts about the step as a second argument. On runs without emulation, only their quick mistakes are tried."""


def facts_of(diverged: DivergedRun) -> StepFacts:
    """Return facts about a scenario's training step. They decide which mistakes are tried.

    If the layout rounds to lower-precision dtypes, the microbatches count as one backward pass. Mistakes then change only the sum
    of their gradients.
    """
    return StepFacts(
        own_rows=True,
        num_backward=1 if diverged.rounding is not None else diverged.num_microbatches,
        clips=isinstance(diverged.training.clipping, ClipNorm),
        differs=False,
    )


def candidates(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield the mistakes to try for a diverged run, in the order of `CATALOGUE`."""
    facts = facts_of(diverged)
    for wrong, phases in CATALOGUE:
        if diverged.first.phase in phases:
            is_general = wrong in GENERAL
            found = wrong(diverged, facts) if is_general else wrong(diverged)
            yield from (each for each in found if each.is_quick or diverged.can_be_emulated or not is_general)
