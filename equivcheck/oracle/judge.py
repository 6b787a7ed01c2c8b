"""Compare ranks, or their failure, with the single-device run, and return the judgement.

Scenarios, tensor programs and users' trainings all use this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.comparison.compare import Comparison, compare, comparison_before
from equivcheck.oracle.reference.coarse import is_large
from equivcheck.oracle.reference.doubt import Doubt, earlier_doubt
from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.sentences import place, sentence
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence, Phase

V = TypeVar("V", bound=Judgement)

MAX_FOLLOWERS = 20
"""Maximum tensors named after the first divergence."""
MAX_CALLS = 5
"""Places of these that calls in the first wrong step take, however many tensors differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """The values and communication calls that a correct run has. References are computed only when they are needed."""

    reference: Callable[[], Reference]
    """Function that returns the reference for the first comparison."""
    confirming_reference: Callable[[], Reference]
    """Function that returns the reference with tolerances from many more perturbed runs. It decides if the first comparison finds
    a difference.
    """
    required_steps: int
    """How many steps the reference must decide. If it decides fewer and nothing differs, the outcome is INCONCLUSIVE."""
    calls: tuple[Divergence, ...] = ()
    """Differences between the ranks' communication calls and the predicted ones. Empty if no calls were predicted."""


def judge(verdict: V, case: ExpectedRun, result: RanksResult) -> tuple[V, Doubt | None]:
    """Judge a run in which all ranks finished.

    Return `verdict` with its outcome, and a `Doubt` if agreement proves nothing from some step on. A difference counts only if
    the confirming reference also shows it. If all differences are below the noise limit, they count only before the first step in
    doubt. If noise exceeds the values in some step, differences count only before this step. If the first differences may come
    from a gradient near zero, with an uncertain sign, no difference counts.
    """
    reference = case.reference()
    found, doubt = _compared(reference, result, Comparison(divergences=(), worst_error=0.0, largest_share=0.0)), reference.doubt
    if found.divergences:
        confirming = case.confirming_reference()
        found, doubt = _compared(confirming, result, found), earlier_doubt(reference.doubt, confirming.doubt)
        if reference.doubt and doubt and found.largest_share < reference.noise_limit:
            found = comparison_before(doubt.step, found)
        elif reference.first_noisy_step is not None and confirming.first_noisy_step is not None:
            found = comparison_before(max(reference.first_noisy_step, confirming.first_noisy_step), found)
        elif (turned := _doubt_by_uncertain_signs(reference, confirming, found)) is not None:
            found, doubt = comparison_before(turned.step, found), earlier_doubt(doubt, turned)
    verdict = _diverged(verdict, found, case.calls)
    if verdict.outcome is Outcome.EQUIVALENT and doubt is not None and doubt.step < case.required_steps:
        verdict = replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=doubt.reason)
    return verdict, doubt


def _doubt_by_uncertain_signs(reference: Reference, confirming: Reference, found: Comparison) -> Doubt | None:
    step = min((one.step for one in found.divergences), default=0)
    tensors = reference.tensors_with_uncertain_signs(step) & confirming.tensors_with_uncertain_signs(step)
    first = [one for one in found.divergences if one.step == step and one.phase is not Phase.STATE]
    if not first or not all(one.phase is Phase.UPDATE and one.tensor in tensors for one in first):
        return None
    return Doubt(reason=f"rounding may turn the sign of gradient {first[0].tensor} at step {step}", step=step)


def judge_coarsely(verdict: V, coarse: Reference, result: RanksResult, calls: tuple[Divergence, ...]) -> V | None:
    """Return the verdict if a difference is too large to be rounding noise; otherwise None.

    `coarse` is a reference from a single run. `calls` contains the differences between actual and predicted communication calls.
    """
    found = compare(coarse, result.run.values, result.before)
    return _diverged(verdict, found, calls) if is_large(found.divergences) else None


def judge_failure(verdict: V, failure: Failure) -> V:
    """Return the verdict with outcome CRASHED or HUNG, for a run in which not all ranks finished."""
    outcome = Outcome.HUNG if failure.hung else Outcome.CRASHED
    return replace(verdict, outcome=outcome, reason=failure.summary, failure=failure)


def _compared(reference: Reference, result: RanksResult, otherwise: Comparison) -> Comparison:
    # A reference that fails before its first moment decides nothing.
    return compare(reference, result.run.values, result.before) if reference.moments else otherwise


def _diverged(verdict: V, found: Comparison, calls: tuple[Divergence, ...]) -> V:
    # In a step, calls come after all values.
    divergences = sorted((*found.divergences, *calls), key=lambda each: (each.step, each.phase is Phase.COMMUNICATION))
    verdict = replace(verdict, outcome=Outcome.EQUIVALENT, worst_error=found.worst_error)
    if not divergences:
        return verdict
    first, *others = divergences
    followers = tuple(place(other) for other in _named(first, others))
    verdict = replace(verdict, followers=followers, num_unnamed=len(others) - len(followers))
    return replace(verdict, outcome=Outcome.DIVERGED, reason=sentence(first), divergence=first)


def _named(first: Divergence, others: list[Divergence]) -> list[Divergence]:
    """Return the first `MAX_FOLLOWERS` divergences in `others`. Calls in the step of `first` always have some of these places."""
    calls = [each for each in others if each.phase is Phase.COMMUNICATION and each.step == first.step][:MAX_CALLS]
    values = [each for each in others if not any(each is call for call in calls)]
    kept = {id(each) for each in (*calls, *values[: MAX_FOLLOWERS - len(calls)])}
    return [each for each in others if id(each) in kept]
