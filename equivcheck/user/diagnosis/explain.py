"""Explain a divergence: try candidate mistakes on one device until one reproduces all values on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from equivcheck.diagnosis.agreement import num_agreeing_moments
from equivcheck.diagnosis.patterns import pattern_of
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.clipping import wrong_clippings
from equivcheck.user.diagnosis.catalogue.linears import wrong_splits
from equivcheck.user.diagnosis.catalogue.losses import wrong_losses
from equivcheck.user.diagnosis.catalogue.microbatches import wrong_accumulations
from equivcheck.user.diagnosis.catalogue.positions import wrong_positions
from equivcheck.user.diagnosis.catalogue.precision import lower_precision, narrower
from equivcheck.user.diagnosis.catalogue.reductions import wrong_reductions
from equivcheck.user.diagnosis.catalogue.rows import wrong_rows
from equivcheck.user.diagnosis.catalogue.settings import wrong_settings
from equivcheck.user.diagnosis.catalogue.shards import local_statistics
from equivcheck.user.diagnosis.catalogue.stale import stale_values
from equivcheck.user.diagnosis.catalogue.start import wrong_start
from equivcheck.user.diagnosis.catalogue.ties import wrong_sharing
from equivcheck.user.diagnosis.catalogue.updates import wrong_updates
from equivcheck.user.diagnosis.counterfactual import Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.work_clock import WorkClock

VALUES = (Difference.VALUE, Difference.RANKS_DISAGREE, Difference.NAN)
"""Differences between values; both sides have the tensor."""
COMPUTED = (Phase.LOSS, Phase.GRADIENT)
UPDATED = (Phase.UPDATE, Phase.STATE)
Wrong = Callable[[DivergedTraining, Honest], Iterator[Counterfactual]]

CATALOGUE: tuple[tuple[Wrong, tuple[Phase, ...]], ...] = (
    (wrong_losses, (Phase.LOSS,)),
    (wrong_start, (*COMPUTED, *UPDATED)),
    (wrong_rows, (*COMPUTED, *UPDATED, Phase.BUFFER)),
    (wrong_clippings, COMPUTED),
    (wrong_reductions, COMPUTED),
    (wrong_splits, COMPUTED),
    (wrong_positions, (Phase.GRADIENT,)),
    (wrong_accumulations, COMPUTED),
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
"""Causes to drop if another one fits, because any constant factor also counts as one of these."""
MOST = 2
"""Largest number of reported causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a training diverged."""

    cause: str
    """Mistake that reproduces all values on the ranks; empty if none does."""
    kinds: tuple[Cause, ...]
    """Short names for the cause."""
    pattern: str
    """Pattern in the differences; it proves nothing. Empty if there is a cause or no pattern."""


def explanation_of(diverged: DivergedTraining) -> Explanation:
    """Explain a divergence as far as possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        honest = _honest(diverged)
        fits = [] if honest is None else _fits(diverged, honest)
    if fits:
        told, kinds = [fit.sentence for fit in fits], tuple(fit.cause for fit in fits)
        return Explanation(cause=told[0] if len(told) == 1 else f"either {', or '.join(told)}", kinds=kinds, pattern="")
    pattern = pattern_of(diverged, narrower(diverged))
    return Explanation(cause="", kinds=(), pattern="" if pattern is None else pattern.sentence)


def _honest(diverged: DivergedTraining) -> Honest | None:
    """Emulate correct ranks; None if they do not reproduce one device, because then emulation proves nothing."""
    num_steps, differs, own_rows = len(diverged.task.batches), False, False
    emulated = EmulatedRanks(diverged, own_rows=False)
    whole = _run(lambda: emulated.train(num_steps))
    if whole is None or _differs(diverged, whole):
        return None
    if diverged.shares and diverged.data_axes:
        parts = _run(lambda: EmulatedRanks(diverged, own_rows=True).train(num_steps))
        differs = parts is not None and _differs(diverged, parts)
        own_rows = parts is not None and not differs
    return Honest(own_rows=own_rows, num_backward=max(emulated.num_seen, 1), clips=emulated.num_clippings > 0, differs=differs)


def _run(train: Callable[[], tuple[UserTrace, ...]]) -> tuple[UserTrace, ...] | None:
    """Traces of an emulation; None if torch or the user's code rejects the mistake."""
    try:
        return train()
    except Exception:
        return None


def _differs(diverged: DivergedTraining, traces: tuple[UserTrace, ...]) -> bool:
    """Whether any value differs from the reference. Losses may cover a rank's own rows only, so they are ignored."""
    found = compare(diverged.reference, traces).divergences
    return any(each.difference in VALUES and each.phase is not Phase.LOSS for each in found)


def _fits(diverged: DivergedTraining, honest: Honest) -> list[Counterfactual]:
    """Candidates that reproduce everything, at most `MOST` different causes."""
    found: list[Counterfactual] = []
    clock = WorkClock()
    for candidate in _candidates(diverged, honest):
        if clock.seconds > LONGEST_SECONDS or len(found) == MOST:
            break
        named = {each.cause for each in found}
        if candidate.cause in (*named, *(FACTORS if found else ())):
            continue
        if _reproduces(diverged, candidate, honest):
            found.append(candidate)
    return found


def _candidates(diverged: DivergedTraining, honest: Honest) -> Iterator[Counterfactual]:
    for wrong, phases in CATALOGUE:
        if diverged.first.phase in phases:
            yield from wrong(diverged, honest)


def _reproduces(diverged: DivergedTraining, candidate: Counterfactual, honest: Honest) -> bool:
    """Whether the candidate reproduces all values. To save time, a first run ends after the first wrong step."""
    step, num_steps = diverged.first.step, len(diverged.task.batches)
    moments = diverged.reference.moments
    least = next((at for at, moment in enumerate(moments) if moment.step > step or moment.phase in ENDS), len(moments))
    if step + 1 < num_steps:
        early = _run(lambda: candidate.run(diverged, step + 1, honest))
        if early is None or num_agreeing_moments(diverged, early) < least:
            return False
    traces = _run(lambda: candidate.run(diverged, num_steps, honest))
    if traces is None or num_agreeing_moments(diverged, traces) < len(diverged.found):
        return False
    return _tells_apart(diverged, traces)


ENDS = (Phase.STATE, Phase.BUFFER)
"""Phases compared only after all steps."""


def _tells_apart(diverged: DivergedTraining, traces: tuple[UserTrace, ...]) -> bool:
    """Whether the candidate's first difference from the reference is also the ranks' first difference."""
    found = compare(diverged.reference, traces).divergences
    return any((each.step, each.phase, each.tensor) == _place(diverged) for each in found)


def _place(diverged: DivergedTraining) -> tuple[int, Phase, str]:
    return diverged.first.step, diverged.first.phase, diverged.first.tensor
