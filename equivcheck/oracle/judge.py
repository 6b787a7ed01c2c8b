"""The judge: from what one device computes of a case, and what its ranks left or how they failed, to a judgement.

It knows no more of a case than `Case` says, so that scenarios and the trainings of users are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.comparison.compare import Comparison, apart_before, compare
from equivcheck.oracle.reference.coarse import is_large
from equivcheck.oracle.reference.doubt import Doubt, earlier
from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.sentences import place, sentence
from equivcheck.oracle.verdict.verdict import Judgement, Outcome
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.trace.differences import Divergence, Phase

V = TypeVar("V", bound=Judgement)

MAX_FOLLOWERS = 20
"""Tensors named beside the first that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is judged: what one device computes, asked for as late as can be, as runs cost time."""

    reference: Callable[[], Reference]
    """What ranks are compared with first."""
    confirming_reference: Callable[[], Reference]
    """What decides where they differ from the first: the same run with a noise floor from many more."""
    required_steps: int
    """Steps that a reference must be able to tell for agreement to say anything: fewer leave the case INCONCLUSIVE."""
    calls: tuple[Divergence, ...] = ()
    """Where ranks did not issue the calls that are expected of them; empty where nothing is expected."""


def judge(verdict: V, case: Case, result: RanksResult) -> tuple[V, Doubt | None]:
    """What is to be said of ranks that all finished, and from where on agreement with the reference proves nothing.

    What differs is held against the confirming reference before it counts. Where the first reference is in doubt as well, a
    difference no larger than its noise counts only in the steps before; and where noise has become larger than all that is there,
    none counts from that step on. Nor does it where all that differs in a step are updates by signs that rounding may turn.
    """
    reference = case.reference()
    found, doubt = _compared(reference, result, Comparison(divergences=(), worst_error=0.0, largest_share=0.0)), reference.doubt
    if found.divergences:
        confirming = case.confirming_reference()
        found, doubt = _compared(confirming, result, found), earlier(reference.doubt, confirming.doubt)
        if reference.doubt and doubt and found.largest_share < reference.noise_limit:
            found = apart_before(doubt.step, found)
        elif reference.drowned is not None and confirming.drowned is not None:
            found = apart_before(max(reference.drowned, confirming.drowned), found)
        elif (turned := _turned_signs(reference, confirming, found)) is not None:
            found, doubt = apart_before(turned.step, found), earlier(doubt, turned)
    verdict = _diverged(verdict, found, case.calls)
    if verdict.outcome is Outcome.EQUIVALENT and doubt is not None and doubt.step < case.required_steps:
        verdict = replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=doubt.reason)
    return verdict, doubt


def _turned_signs(reference: Reference, confirming: Reference, found: Comparison) -> Doubt | None:
    """The doubt of the first step that differs if all that does are updates by signs that rounding may turn; else None."""
    step = min((one.step for one in found.divergences), default=0)
    tensors = reference.turned_signs(step) & confirming.turned_signs(step)
    first = [one for one in found.divergences if one.step == step and one.phase is not Phase.STATE]
    if not first or not all(one.phase is Phase.UPDATE and one.tensor in tensors for one in first):
        return None
    return Doubt(reason=f"rounding may turn signs of gradient {first[0].tensor} at step {step}", step=step)


def judge_coarsely(verdict: V, coarse: Reference, result: RanksResult, calls: tuple[Divergence, ...]) -> V | None:
    """The same where ranks are so far from a single run of the reference that its noise need not be known; else None."""
    found = compare(coarse, result.run.values, result.before)
    return _diverged(verdict, found, calls) if is_large(found.divergences) else None


def judge_failure(verdict: V, failure: Failure) -> V:
    """What is to be said of ranks that did not all finish."""
    outcome = Outcome.HUNG if failure.hung else Outcome.CRASHED
    return replace(verdict, outcome=outcome, reason=failure.summary, failure=failure)


def _compared(reference: Reference, result: RanksResult, otherwise: Comparison) -> Comparison:
    """How ranks compare with a reference; one that is lost before its first moment leaves what was found `otherwise`."""
    return compare(reference, result.run.values, result.before) if reference.moments else otherwise


def _diverged(verdict: V, found: Comparison, calls: tuple[Divergence, ...]) -> V:
    """The judgement with the first divergence and its followers; EQUIVALENT where there is none."""
    divergences = _in_order(found.divergences, calls)
    verdict = replace(verdict, outcome=Outcome.EQUIVALENT, worst_error=found.worst_error)
    if not divergences:
        return verdict
    first, *others = divergences
    followers = tuple(place(other) for other in others[:MAX_FOLLOWERS])
    verdict = replace(verdict, followers=followers, num_unnamed=len(others) - len(followers))
    return replace(verdict, outcome=Outcome.DIVERGED, reason=sentence(first), divergence=first)


def _in_order(values: tuple[Divergence, ...], calls: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
    """By step; in a step, calls come after all values."""
    return tuple(sorted((*values, *calls), key=lambda found: (found.step, found.phase is Phase.COMMUNICATION)))
