"""`check`: one scenario, one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from equivcheck.comparison.communication import CallComparison, compare_calls
from equivcheck.comparison.compare import apart_before, compare
from equivcheck.composition.hand_over_limits import why_unsupported
from equivcheck.composition.registry import rounding_of
from equivcheck.composition.running import RanksResult, Runner, able
from equivcheck.known_issues.known import known_issue, known_issues
from equivcheck.reference.coarse import is_large
from equivcheck.reference.doubt import Doubt, earlier
from equivcheck.reference.reference import coarse_reference, confirming_reference, noise_limit, reference
from equivcheck.scenario import Scenario
from equivcheck.tally import IN_PART, record
from equivcheck.trace.differences import Divergence, Phase
from equivcheck.train.setup import Setup
from equivcheck.verdict.sentences import place, sentence
from equivcheck.verdict.verdict import Outcome, Verdict, explain_by
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks

MAX_FOLLOWERS = 20
"""Tensors named beside the first that differs."""
BEYOND = "beyond what the layout supports nothing is foreseen"
"""Why calls are not held against predictions there."""
HANDED_OVER = "what a checkpoint tells ranks between two layouts is not foreseen"
"""Why calls are not held against predictions where the first steps ran under another layout."""


def check(  # noqa: PLR0913 - options, all by keyword
    scenario: Scenario,
    *,
    world: str | Ranks = "sim",
    deadline: float = 60.0,
    alter: Callable[[Setup], None] | None = None,
    beyond: bool = False,
    coarse: bool = False,
) -> Verdict:
    """Say whether a scenario's parallel training computes what one device computes.

    `world` names a world or is one of the right size; a scenario that compiles runs in gloo where sim is asked for, and the
    verdict says so. `deadline` is in seconds, for the ranks alone; compiling gets 150 more. `alter` is called with each rank's
    setup after its layout has been applied: a way to plant a fault. With `beyond`, what torch is known not to support is run all
    the same, and calls are not held against predictions. With `coarse`, meant for shrinking, what is too far from the reference
    for any noise is judged without measuring noise, and all else as usual: DIVERGED may then be in doubt in full.
    Failures of the ranks are verdicts; `UsageError` is raised for a world that does not exist.
    """
    started = time.perf_counter()
    runner = Runner(world=able(scenario, world), deadline=deadline, alter=alter)
    verdict = _judge(scenario, runner, beyond=beyond, coarse=coarse)
    record(scenario.layout.name, verdict.world, IN_PART if verdict.undecided else verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _explained(verdict: Verdict, alter: Callable[[Setup], None] | None) -> Verdict:
    """Imported when it is asked for: a diagnosis is what few checks need."""
    from equivcheck.diagnosis.explain import explained

    return explained(verdict, alter=alter)


explain_by(_explained)


def _judge(scenario: Scenario, runner: Runner, *, beyond: bool, coarse: bool) -> Verdict:
    name = runner.world if isinstance(runner.world, str) else runner.world.name
    reason = why_unsupported(scenario, beyond=beyond)
    if reason is not None:
        return Verdict(outcome=Outcome.UNSUPPORTED, scenario=scenario, world=name, reason=reason)
    try:
        left = runner.run(scenario)
    except RanksFailed as error:
        outcome = Outcome.HUNG if error.failure.hung else Outcome.CRASHED
        failed = Verdict(outcome=outcome, scenario=scenario, world=name, reason=error.failure.summary, failure=error.failure)
        return _settle(failed)
    heard = _heard(scenario, name, left, beyond)
    compared = _far_apart(scenario, name, left, heard) if coarse else None
    found = _compared(scenario, name, left, heard) if compared is None else compared
    verdict = _settle(found)
    if verdict.outcome is Outcome.KNOWN and _is_wrong_without(verdict, runner, coarse=coarse):
        verdict = found
    return replace(verdict, calls=left.run.calls, unforeseen=heard.unforeseen)


def _is_wrong_without(verdict: Verdict, runner: Runner, *, coarse: bool) -> bool:
    """Whether the ranks are wrong as well where the issue that was taken for the reason cannot show."""
    issue = next(issue for issue in known_issues() if issue.id == verdict.known)
    avoided = issue.avoided(verdict.scenario)
    return avoided is not None and _judge(avoided, runner, beyond=False, coarse=coarse).outcome.is_finding


def _heard(scenario: Scenario, world: str, left: RanksResult, beyond: bool) -> CallComparison:
    """The run's calls held against what is foreseen."""
    if beyond or scenario.start is not None:
        return CallComparison(unforeseen=BEYOND if beyond else HANDED_OVER)
    return compare_calls(scenario, world, left.run)


def _far_apart(scenario: Scenario, world: str, left: RanksResult, heard: CallComparison) -> Verdict | None:
    """The verdict where ranks are so far from a single run of the reference that its noise need not be known; else None."""
    expected = coarse_reference(scenario.training, rounding_of(scenario.layout))
    found = compare(expected, left.run.values, left.before)
    if not is_large(found.divergences):
        return None
    return _diverged(scenario, world, _in_order(found.divergences, heard.divergences), found.worst_error)


def _compared(scenario: Scenario, world: str, left: RanksResult, heard: CallComparison) -> Verdict:
    training, rounding = scenario.training, rounding_of(scenario.layout)
    expected = reference(training, rounding)
    found, doubt = compare(expected, left.run.values, left.before), expected.doubt
    if found.divergences:
        num_parts = max(layout.num_data_ranks for layout in scenario.layouts)
        sure = confirming_reference(training, num_parts, rounding)
        found, doubt = compare(sure, left.run.values, left.before), earlier(doubt, sure.doubt)
        if expected.doubt and doubt and found.largest_share < noise_limit(training, rounding):
            found = apart_before(doubt, found)
    divergences = _in_order(found.divergences, heard.divergences)
    if divergences:
        return _diverged(scenario, world, divergences, found.worst_error)
    return _agreeing(scenario, world, doubt, found.worst_error)


def _agreeing(scenario: Scenario, world: str, doubt: Doubt | None, worst_error: float) -> Verdict:
    """What agreement says: of a reference that is lost at some step, what the steps before it say of all layouts."""
    verdict = Verdict(outcome=Outcome.EQUIVALENT, scenario=scenario, world=world, worst_error=worst_error)
    if doubt is None:
        return verdict
    if doubt.step <= (scenario.start.steps if scenario.start else 0):
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=doubt.reason)
    return replace(verdict, undecided=f"not decided from step {doubt.step} on: {doubt.reason}")


def _diverged(scenario: Scenario, world: str, divergences: tuple[Divergence, ...], worst_error: float) -> Verdict:
    first = divergences[0]
    return Verdict(
        outcome=Outcome.DIVERGED,
        scenario=scenario,
        world=world,
        reason=sentence(first),
        divergence=first,
        followers=tuple(place(other) for other in divergences[1 : 1 + MAX_FOLLOWERS]),
        worst_error=worst_error,
    )


def _settle(verdict: Verdict) -> Verdict:
    """Mark a failure that an upstream issue on file explains."""
    issue = known_issue(verdict) if verdict.outcome.is_finding else None
    if issue is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=issue.id, reason=f"{issue.link}: {verdict.reason}")


def _in_order(values: tuple[Divergence, ...], calls: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
    """By step; in a step, calls come after all values."""
    return tuple(sorted((*values, *calls), key=lambda found: (found.step, found.phase is Phase.COMMUNICATION)))
