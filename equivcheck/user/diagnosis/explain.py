"""Explains a divergence: tries mistakes on one device until one reproduces all values on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from equivcheck.diagnosis.agreement import differs_in_first_tensor, num_agreeing_moments
from equivcheck.diagnosis.mistake import COMPUTED, FACTORS, UPDATED, Emulate, Mistake, StepFacts
from equivcheck.diagnosis.mistakes.clipping import wrong_clippings
from equivcheck.diagnosis.mistakes.initial_values import wrong_start
from equivcheck.diagnosis.mistakes.local_statistics import local_statistics
from equivcheck.diagnosis.mistakes.microbatches import unzeroed_gradients, updates_in_microbatches, wrong_accumulations
from equivcheck.diagnosis.mistakes.precision import lower_precision, narrower_types
from equivcheck.diagnosis.mistakes.reductions import constant_ratios, wrong_factors, wrong_gradient_shards, wrong_reductions
from equivcheck.diagnosis.mistakes.settings import wrong_settings
from equivcheck.diagnosis.mistakes.stale import stale_values
from equivcheck.diagnosis.mistakes.updates import wrong_updates
from equivcheck.diagnosis.patterns import pattern_of
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.catalogue.averages import wrong_averages, wrong_averages_outside
from equivcheck.user.diagnosis.catalogue.calls import repeated_forwards, skipped_zeroing, wrong_in_backward
from equivcheck.user.diagnosis.catalogue.clipping import clipped_otherwise
from equivcheck.user.diagnosis.catalogue.components import fused_as_one_block, wrong_components
from equivcheck.user.diagnosis.catalogue.data import wrong_losses, wrong_rows
from equivcheck.user.diagnosis.catalogue.layers import wrong_positions, wrong_splits
from equivcheck.user.diagnosis.catalogue.loss_terms import wrong_loss_terms
from equivcheck.user.diagnosis.catalogue.parameters import missing_gradients, trained_frozen, wrong_sharing, zeros_for_none
from equivcheck.user.diagnosis.catalogue.split_modules import norms_of_parts, wrong_embeddings, wrong_heads
from equivcheck.user.diagnosis.catalogue.tokens.attention import lost_key_gradients, wrong_masks
from equivcheck.user.diagnosis.catalogue.tokens.cross_entropies import wrong_cross_entropies
from equivcheck.user.diagnosis.catalogue.tokens.positions import losses_of_parts, restarted_positions, shifted_labels
from equivcheck.user.diagnosis.catalogue.weights import wrong_weights, wrong_weights_of_ranks
from equivcheck.user.diagnosis.clipping_repair import clipped_by_hand, wrong_norms
from equivcheck.user.diagnosis.contradiction import RealValues, are_gradients_scaled
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.known_backward import KnownBackward
from equivcheck.user.diagnosis.partial_reductions import partial_reductions
from equivcheck.user.diagnosis.repair import missing_reductions
from equivcheck.user.diagnosis.reported_values import wrong_reported_values
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.trace import Trace
from equivcheck.worlds.work_clock import WorkClock

VALUES = (Difference.VALUE, Difference.RANKS_DISAGREE, Difference.NAN)
"""Kinds of difference between values, for tensors that both sides have."""
Wrong = Callable[[DivergedTraining, StepFacts], Iterator[Mistake]]


def _clippings_after_gradients(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield wrong clippings if a trainer records gradients before it clips, because updates are then the first difference."""
    if diverged.task.reads_unclipped:
        yield from wrong_clippings(diverged, facts)


CATALOGUE: tuple[tuple[Wrong, tuple[Phase, ...]], ...] = (
    (wrong_losses, (Phase.LOSS,)),
    (wrong_components, (*COMPUTED, *UPDATED)),
    (wrong_start, (*COMPUTED, *UPDATED)),
    (wrong_in_backward, COMPUTED),
    (wrong_rows, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (missing_gradients, (Phase.GRADIENT,)),
    (trained_frozen, (Phase.GRADIENT,)),
    (zeros_for_none, (Phase.GRADIENT,)),
    (wrong_clippings, COMPUTED),
    (clipped_otherwise, (Phase.GRADIENT,)),
    (_clippings_after_gradients, UPDATED),
    (unzeroed_gradients, COMPUTED),
    (wrong_reductions, COMPUTED),
    (wrong_factors, COMPUTED),
    (wrong_loss_terms, COMPUTED),
    (wrong_splits, COMPUTED),
    (wrong_positions, (Phase.GRADIENT,)),
    (wrong_embeddings, COMPUTED),
    (norms_of_parts, COMPUTED),
    (wrong_heads, COMPUTED),
    (fused_as_one_block, (Phase.LOSS,)),
    (wrong_masks, (Phase.LOSS,)),
    (restarted_positions, COMPUTED),
    (lost_key_gradients, (Phase.GRADIENT,)),
    (losses_of_parts, (Phase.LOSS,)),
    (shifted_labels, (Phase.LOSS,)),
    (wrong_cross_entropies, COMPUTED),
    (wrong_accumulations, COMPUTED),
    (skipped_zeroing, COMPUTED),
    (updates_in_microbatches, COMPUTED),
    (wrong_weights, COMPUTED),
    (wrong_weights_of_ranks, COMPUTED),
    (wrong_gradient_shards, (Phase.GRADIENT,)),
    (constant_ratios, COMPUTED),
    (repeated_forwards, (Phase.BUFFER,)),
    (wrong_averages, (Phase.UPDATE, Phase.BUFFER)),
    (local_statistics, UPDATED),
    (stale_values, (*COMPUTED, *UPDATED)),
    (wrong_settings, (*COMPUTED, *UPDATED)),
    (wrong_updates, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (wrong_sharing, COMPUTED),
    (lower_precision, (*COMPUTED, *UPDATED)),
)
"""Each function yields candidates for trainings with their first difference in one of the given phases.

The order matters: the first matching candidate is reported.
"""

UPDATES = (local_statistics, wrong_settings, wrong_updates)
"""Functions that yield mistakes without an effect before an optimizer update."""
LONGEST_SECONDS = 60.0
"""Time limit for the search, in seconds."""
OTHER_ROWS = (Cause.MEAN_OF_MEANS, Cause.SAME_ROWS, Cause.NOT_REDUCED)
"""Causes to which no second cause is added. Each candidate that uses the ranks' own rows would repeat such a cause."""
SAME_MEANING = (
    {Cause.REPLICAS_IN_NORM, Cause.ANOTHER_NORM},
    {Cause.HYPERPARAMETER, Cause.DECAY_EVERYWHERE},
    {Cause.AVERAGE_OF_WEIGHTS, Cause.STALE},
)
"""Sets of causes that are one mistake in different words. Only the first cause that fits is reported."""
MOST = 2
"""Maximum number of reported causes."""
NOTHING_TRIED = "no known fault changes only this"
UNEXPLAINED = "none of the {count} known faults reproduces this"
OUT_OF_TIME = "none of the {count} known faults that were tried reproduces this; the search ended after {seconds:.0f} s"
NOT_TRIED = "no known fault was tried: your step, run on one device for each rank in turns, differs from the single-device run"


def explanation_of(diverged: DivergedTraining) -> UserDiagnosis:
    """Find the mistake that reproduces all values on the ranks.

    If there is none, return a pattern in the differences as a hint.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits: Sequence[Mistake | Diagnosis] = wrong_reported_values(diverged) or wrong_averages_outside(diverged)
        unexplained = ""
        if not fits:
            emulation = _emulation(diverged)
            found, unexplained = ([], NOT_TRIED) if emulation is None else _fits(diverged, *emulation)
            fits = found or missing_reductions(diverged) or partial_reductions(diverged) or wrong_norms(diverged)
    if fits:
        words = ", or ".join(fit.sentence for fit in fits)
        cause = words if len(fits) == 1 else f"either {words}"
        return UserDiagnosis(cause=cause, kinds=tuple(fit.cause for fit in fits))
    writes = diverged.repeated_writes() if diverged.first.phase is Phase.BUFFER else ""
    pattern = None if writes else clipped_by_hand(diverged) or pattern_of(diverged, narrower_types(diverged))
    return UserDiagnosis(hint=writes if pattern is None else pattern.sentence, unexplained=unexplained)


@dataclass(frozen=True, slots=True, eq=False)
class _Correct:
    ranks: EmulatedUserRanks
    differs: bool


def _emulation(diverged: DivergedTraining) -> tuple[StepFacts, Emulate] | None:
    """Emulate correct ranks, and return a function that emulates ranks with a mistake.

    None if correct ranks differ from one device.

    Ranks compute on all rows only if they have no other rows, or do not reproduce one device with their own.
    """
    known = KnownBackward()
    correct = partial(_correct, diverged, known)
    one = correct(own_rows=False, one=True)
    own = correct(own_rows=True) if diverged.has_own_rows else None
    own_rows = own is not None and not own.differs
    emulated = own if own_rows else correct(own_rows=False)
    if one is not None and one.ranks.updates_in_backward:
        emulated, own_rows = one, False
    if one is None or one.differs or emulated is None or emulated.differs:
        return None
    known.is_complete = True
    facts = StepFacts(
        own_rows=own_rows,
        num_backward=max(emulated.ranks.num_seen, 1),
        clips=emulated.ranks.num_clippings > 0,
        # Without a backward pass, as with `torch.autograd.grad`, emulated ranks do not reduce gradients.
        differs=own is not None and own.differs and own.ranks.num_seen > 0,
        updates_in_backward=emulated.ranks.updates_in_backward,
    )
    steps_once = all(count == diverged.num_steps for count in emulated.ranks.num_updates)
    # With several steps per batch, a trace has the gradients of the last one.
    real = RealValues(diverged, (Phase.GRADIENT, Phase.UPDATE) if steps_once else (Phase.UPDATE,))
    return facts, partial(_emulated, diverged, known, real)


def _emulated(
    diverged: DivergedTraining, known: KnownBackward, real: RealValues | None, *, own_rows: bool, one: bool = False
) -> EmulatedUserRanks:
    ranks = EmulatedUserRanks(diverged, own_rows=own_rows, one=one)
    ranks.known, ranks.require = known, None if real is None else real.require
    return ranks


def _correct(diverged: DivergedTraining, known: KnownBackward, *, own_rows: bool, one: bool = False) -> _Correct | None:
    """Emulate ranks without a mistake; None if torch or the user's code rejects that."""
    ranks = _emulated(diverged, known, None, own_rows=own_rows, one=one)
    traces = _run(lambda: ranks.train(diverged.num_steps))
    return None if traces is None else _Correct(ranks, _differs(diverged, traces))


def _run(train: Callable[[], tuple[Trace, ...]]) -> tuple[Trace, ...] | None:
    """Return an emulation's traces.

    None if the values contradict those of the ranks, or if torch or the user's code rejects the mistake.
    """
    try:
        return train()
    except Exception:
        return None


def _differs(diverged: DivergedTraining, traces: tuple[Trace, ...]) -> bool:
    """Whether any value differs from the reference. Losses and reported values may cover a rank's own rows only."""
    found = compare(diverged.reference, traces).divergences
    return any(each.difference in VALUES and each.phase not in (Phase.LOSS, Phase.REPORTED) for each in found)


def _fits(diverged: DivergedTraining, facts: StepFacts, emulate: Emulate) -> tuple[list[Mistake], str]:
    """Return at most `MOST` candidates with different causes that reproduce all values, and why there are none.

    After the first cause, only quick candidates are tried.
    """
    found: list[Mistake] = []
    clock, num_tried, are_scaled = WorkClock(), 0, diverged.first.phase not in COMPUTED or are_gradients_scaled(diverged)
    for candidate in _candidates(diverged, facts):
        if clock.seconds > LONGEST_SECONDS or len(found) == MOST:
            return found, OUT_OF_TIME.format(count=num_tried, seconds=LONGEST_SECONDS)
        num_tried += 1
        if found and not candidate.is_quick:
            continue
        is_possible = (are_scaled or not candidate.scales_gradients) and _says_more(candidate, {each.cause for each in found})
        if is_possible and _reproduces(diverged, candidate, facts, emulate):
            found.append(candidate)
    return found, UNEXPLAINED.format(count=num_tried) if num_tried else NOTHING_TRIED


def _candidates(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes that may show first in the phase of the first difference.

    If the last update agrees, earlier updates agree too.
    """
    first, updates_agree = diverged.first, _last_update_agrees(diverged)
    for wrong, phases in CATALOGUE:
        if first.phase in phases and not (updates_agree and wrong in UPDATES):
            yield from wrong(diverged, facts)


def _last_update_agrees(diverged: DivergedTraining) -> bool:
    """Whether loss or gradients differ first, after an update in which all parameters agree, or before any update."""
    last = (diverged.first.step - 1, Phase.UPDATE)
    updates = [moment for moment in diverged.reference.moments if (moment.step, moment.phase) == last]
    return diverged.first.phase in COMPUTED and all(all(moment.present) for moment in updates)


def _says_more(candidate: Mistake, found: set[Cause]) -> bool:
    """Whether a candidate has another meaning than the causes already found."""
    if not found:
        return True
    if candidate.own_rows and not found.isdisjoint(OTHER_ROWS):
        return False
    return candidate.cause not in found.union(FACTORS, *(causes for causes in SAME_MEANING if found & causes))


def _reproduces(diverged: DivergedTraining, candidate: Mistake, facts: StepFacts, emulate: Emulate) -> bool:
    """Whether the candidate reproduces all values."""
    traces = _run(lambda: candidate.run(emulate, diverged.num_steps, facts))
    return (
        traces is not None
        and num_agreeing_moments(diverged, traces) == len(diverged.found)
        and differs_in_first_tensor(diverged, traces)
    )
