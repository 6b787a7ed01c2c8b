"""Decide from compared values whether two runs are equivalent, and say what differs first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.compare.facts import Gap
from equivcheck.recording.compare.moved import largest_noise
from equivcheck.recording.compare.tensors import FLOOR, GRADIENTS
from equivcheck.recording.compare.verdict import Group, TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

CLUES = (Moment.SAMPLES, Moment.OUTPUT, Moment.LOSS, Moment.NORM)
"""Points in a step whose values explain differences.
Only parameters, gradients, state and buffers decide, because a scaled loss may be right."""


def judge(
    differences: Sequence[TensorDifference], gaps: Sequence[Gap], *, is_measured: bool, first_step: int, output_eps: float
) -> tuple[Outcome, TensorDifference | None]:
    """Return the outcome and the first difference, from all differing values and all gaps.

    `gaps` are needed values that a trace lacks. They make the outcome INCONCLUSIVE instead of EQUIVALENT. Without measured noise
    (`is_measured`), only differences that rounding never makes are DIVERGED. `output_eps` is the machine epsilon for the coarsest
    module output, and `first_step` the first compared step.
    """
    effects = [each for each in differences if each.moment not in CLUES]
    starts_equal = not any(each.moment is Moment.START for each in effects)
    early = first_step if starts_equal else -1
    certain = [each for each in differences if not each.is_undecided and (is_measured or _is_certain(each, early, output_eps))]
    decisive = next((each for each in certain if each.moment not in CLUES), None)
    if decisive is not None:
        return Outcome.DIVERGED, next(each for each in certain if each.step == decisive.step)
    if effects:
        return Outcome.INCONCLUSIVE, effects[0]
    return (Outcome.INCONCLUSIVE if gaps else Outcome.EQUIVALENT), None


def _is_certain(found: TensorDifference, early: int, output_eps: float) -> bool:
    """Whether rounding cannot explain a difference.

    This is so for a missing tensor, another start, or a value that is far off in step `early`.
    """
    if found.moment is Moment.START or found.difference not in (Difference.VALUE, Difference.RANKS_DISAGREE):
        return True
    if not found.eps:
        return True  # integers and samples are not rounded
    is_early = found.moment in (*GRADIENTS, *CLUES) and found.step == early
    # `allowed` is FLOOR * eps * size if no moved run was given.
    return is_early and found.error * FLOOR * found.eps > largest_noise(max(found.eps, output_eps))


def groups_of(compared: Sequence[TensorDifference], differences: Sequence[TensorDifference]) -> tuple[Group, ...]:
    """Count differing and compared values at each point in training (step and moment) with a difference."""
    different = Counter((each.step, each.moment) for each in differences)
    total = Counter((each.step, each.moment) for each in compared)
    return tuple(
        Group(step=step, moment=moment, num_different=number, num_compared=total[step, moment])
        for (step, moment), number in different.items()
    )
