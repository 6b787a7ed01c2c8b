"""Explain a divergence: try candidate mistakes on one device until one reproduces all values on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from equivcheck.diagnosis.agreement import num_agreeing_moments
from equivcheck.diagnosis.mistakes.clipping import wrong_clippings
from equivcheck.diagnosis.mistakes.microbatches import wrong_accumulations
from equivcheck.diagnosis.mistakes.precision import lower_precision, narrower_types
from equivcheck.diagnosis.mistakes.reductions import constant_ratios, wrong_factors, wrong_gradient_shards, wrong_reductions
from equivcheck.diagnosis.mistakes.settings import wrong_settings
from equivcheck.diagnosis.mistakes.stale import stale_values
from equivcheck.diagnosis.mistakes.updates import wrong_updates
from equivcheck.diagnosis.patterns import pattern_of
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.catalogue.addends import wrong_addends
from equivcheck.user.diagnosis.catalogue.attention import wrong_masks
from equivcheck.user.diagnosis.catalogue.components import fused_as_one_block, wrong_components
from equivcheck.user.diagnosis.catalogue.data import wrong_losses, wrong_rows
from equivcheck.user.diagnosis.catalogue.layers import wrong_positions, wrong_splits
from equivcheck.user.diagnosis.catalogue.parameters import local_statistics, missing_gradients, wrong_sharing, wrong_start
from equivcheck.user.diagnosis.catalogue.weights import wrong_weights
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.user.diagnosis.repair import missing_reductions
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.trace import Trace
from equivcheck.worlds.work_clock import WorkClock

ENDS = (Phase.STATE, Phase.BUFFER)
"""Phases after a step that a run compares only if the step is its last, or not its last."""
VALUES = (Difference.VALUE, Difference.RANKS_DISAGREE, Difference.NAN)
"""Kinds of difference between values, for tensors that both sides have."""
COMPUTED = (Phase.LOSS, Phase.GRADIENT)
UPDATED = (Phase.UPDATE, Phase.STATE)
Wrong = Callable[[DivergedTraining, StepFacts], Iterator[Mistake]]

CATALOGUE: tuple[tuple[Wrong, tuple[Phase, ...]], ...] = (
    (wrong_losses, (Phase.LOSS,)),
    (wrong_components, (*COMPUTED, *UPDATED)),
    (wrong_start, (*COMPUTED, *UPDATED)),
    (wrong_rows, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (missing_gradients, (Phase.GRADIENT,)),
    (wrong_clippings, COMPUTED),
    (wrong_reductions, COMPUTED),
    (wrong_factors, COMPUTED),
    (wrong_addends, COMPUTED),
    (wrong_splits, COMPUTED),
    (wrong_positions, (Phase.GRADIENT,)),
    (fused_as_one_block, (Phase.LOSS,)),
    (wrong_masks, (Phase.LOSS,)),
    (wrong_accumulations, COMPUTED),
    (wrong_weights, COMPUTED),
    (wrong_gradient_shards, (Phase.GRADIENT,)),
    (constant_ratios, COMPUTED),
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

LONGEST_SECONDS = 60.0
"""Time limit for the search, in seconds."""
FACTORS = (Cause.SCALED, Cause.NOT_UNSCALED)
"""Causes that stand for any constant factor. They are dropped if another cause fits."""
OTHER_ROWS = (Cause.MEAN_OF_MEANS, Cause.SAME_ROWS)
"""Causes that each candidate on the ranks' own rows repeats, so no such candidate is reported in addition to them."""
SAME_MEANING = ({Cause.REPLICAS_IN_NORM, Cause.ANOTHER_NORM}, {Cause.HYPERPARAMETER, Cause.DECAY_EVERYWHERE})
"""Causes that are one mistake in different words. Only the first that fits is reported."""
MOST = 2
"""Maximum number of reported causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a training diverged."""

    cause: str
    """Mistake that reproduces all values on the ranks; empty if none does."""
    kinds: tuple[Cause, ...]
    """Short names for the cause."""
    pattern: str
    """Pattern in the differences. It is not a proof. Empty if there is a cause or no pattern."""
    unexplained: str = ""
    """Why there is no cause; empty if there is one."""


def explanation_of(diverged: DivergedTraining) -> Explanation:
    """Explain a divergence as far as possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = _step_facts(diverged)
        fits: Sequence[Mistake | Diagnosis] = [] if facts is None else _fits(diverged, facts)
        fits = fits or missing_reductions(diverged)
    if fits:
        words = ", or ".join(fit.sentence for fit in fits)
        cause = words if len(fits) == 1 else f"either {words}"
        return Explanation(cause=cause, kinds=tuple(fit.cause for fit in fits), pattern="")
    pattern = pattern_of(diverged, narrower_types(diverged))
    return Explanation(cause="", kinds=(), pattern="" if pattern is None else pattern.sentence)


def _step_facts(diverged: DivergedTraining) -> StepFacts | None:
    """Emulate correct ranks; None if they do not reproduce one device, because then emulation proves nothing."""
    num_steps, differs, own_rows = len(diverged.task.batches), False, False
    emulated = EmulatedUserRanks(diverged, own_rows=False)
    correct = _run(lambda: emulated.train(num_steps))
    if correct is None or _differs(diverged, correct):
        return None
    if diverged.has_own_rows:
        parts = _run(lambda: EmulatedUserRanks(diverged, own_rows=True).train(num_steps))
        differs = parts is not None and _differs(diverged, parts)
        own_rows = parts is not None and not differs
    return StepFacts(own_rows=own_rows, num_backward=max(emulated.num_seen, 1), clips=emulated.num_clippings > 0, differs=differs)


def _run(train: Callable[[], tuple[Trace, ...]]) -> tuple[Trace, ...] | None:
    """An emulation's traces; None if torch or the user's code rejects the mistake."""
    try:
        return train()
    except Exception:
        return None


def _differs(diverged: DivergedTraining, traces: tuple[Trace, ...]) -> bool:
    """Whether any value differs from the reference. Losses and reported values may cover a rank's own rows only."""
    found = compare(diverged.reference, traces).divergences
    return any(each.difference in VALUES and each.phase not in (Phase.LOSS, Phase.REPORTED) for each in found)


def _fits(diverged: DivergedTraining, facts: StepFacts) -> list[Mistake]:
    """Candidates that reproduce everything, at most `MOST` different causes."""
    found: list[Mistake] = []
    clock = WorkClock()
    phase = diverged.first.phase
    candidates = (each for wrong, phases in CATALOGUE if phase in phases for each in wrong(diverged, facts))
    for candidate in candidates:
        if clock.seconds > LONGEST_SECONDS or len(found) == MOST:
            break
        if _says_more(candidate, {each.cause for each in found}) and _reproduces(diverged, candidate, facts):
            found.append(candidate)
    return found


def _says_more(candidate: Mistake, found: set[Cause]) -> bool:
    """Whether a candidate says something else than the causes already found."""
    if not found:
        return True
    if candidate.own_rows and not found.isdisjoint(OTHER_ROWS):
        return False
    return candidate.cause not in found.union(FACTORS, *(alike for alike in SAME_MEANING if found & alike))


def _reproduces(diverged: DivergedTraining, candidate: Mistake, facts: StepFacts) -> bool:
    """Whether the candidate reproduces all values. To save time, a first run ends after the first wrong step."""
    step, num_steps = diverged.first.step, len(diverged.task.batches)
    moments = diverged.reference.moments
    least = next(at for at, moment in enumerate(moments) if (moment.step, moment.phase in ENDS) >= (step, True))
    if step + 1 < num_steps:
        early = _run(lambda: candidate.run(partial(EmulatedUserRanks, diverged), step + 1, facts))
        if early is None or num_agreeing_moments(diverged, early) < least:
            return False
    traces = _run(lambda: candidate.run(partial(EmulatedUserRanks, diverged), num_steps, facts))
    if traces is None or num_agreeing_moments(diverged, traces) < len(diverged.found):
        return False
    # A candidate that is itself within tolerance would fit ranks that only nearly diverged.
    first = (diverged.first.step, diverged.first.phase, diverged.first.tensor)
    found = compare(diverged.reference, traces).divergences
    return any((each.step, each.phase, each.tensor) == first for each in found)
