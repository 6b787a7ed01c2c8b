"""`check`: one scenario, one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.composition.running import RanksResult, Runner, able
from equivcheck.oracle.comparison.communication import CallComparison, compare_calls
from equivcheck.oracle.judge import Case, judge, judge_coarsely, judge_failure
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.verdict import Outcome, Verdict, explain_by
from equivcheck.scenario import Scenario
from equivcheck.system.tally import IN_PART, record
from equivcheck.training.setup import Setup
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import on_first_rank
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.signature import signature
from equivcheck.worlds.trace.differences import Divergence
from equivcheck.worlds.world import World, without_cover

if TYPE_CHECKING:
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.programs.verdict import ProgramVerdict

BEYOND = "beyond what the layout supports no calls are predicted"
"""Why calls are not held against predictions there."""
RESUMED = "saving and loading a checkpoint is not modelled"
"""Why calls are not held against predictions where the first steps ran under another layout."""


@overload
def check(
    scenario: Scenario,
    *,
    world: str | Ranks | World = ...,
    deadline: float = ...,
    alter: Callable[[Setup], None] | None = ...,
    beyond: bool = ...,
    coarse: bool = ...,
) -> Verdict: ...


@overload
def check(
    scenario: TensorProgram, *, world: str | Ranks | World = ..., deadline: float = ..., target: str = ...
) -> ProgramVerdict: ...


def check(  # noqa: PLR0913 - options, all by keyword
    scenario: Scenario | TensorProgram,
    *,
    world: str | Ranks | World = "sim",
    deadline: float = 60.0,
    alter: Callable[[Setup], None] | None = None,
    beyond: bool = False,
    coarse: bool = False,
    target: str = "dtensor",
) -> Verdict | ProgramVerdict:
    """Say whether a scenario's parallel training, or a tensor program on ranks, computes what one device computes.

    `world` names a world or is one of the right size; in ``torchrun`` every process of the world calls this, that of rank 0
    judges, and all return its verdict. A scenario that compiles runs in gloo where sim is asked for, and the verdict says so.
    `deadline` is in seconds, for the ranks alone; compiling gets 150 more. `alter` is called with each rank's setup after its
    layout has been applied: a way to plant a fault. With `beyond`, what torch is known not to support is run all the same, and
    calls are not held against predictions. With `coarse`, meant for shrinking, what is too far from the reference for any noise
    is judged without measuring noise, and all else as usual: DIVERGED may then be in doubt in full.
    Of a tensor program there is none of these three, but `target`, what ranks run it on: ``dtensor``, ``plain`` (plain tensors
    with functional collectives) or ``compiled`` (DTensors, each operation under `torch.compile`, in gloo). Failures of the ranks
    are verdicts; `UsageError` is raised for a world or a target that does not exist.
    """
    if not isinstance(scenario, Scenario):
        from equivcheck.programs.check import check_program

        where = without_cover(world)
        return on_first_rank(where, lambda: check_program(scenario, world=where, deadline=deadline, target=target))
    started = time.perf_counter()
    runner = Runner(world=able(scenario, without_cover(world)), deadline=deadline, alter=alter)
    verdict = on_first_rank(runner.world, lambda: _judge(scenario, runner, beyond=beyond, coarse=coarse))
    record(scenario.layout.name, verdict.world, IN_PART if verdict.undecided else verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _explained(verdict: Verdict, alter: Callable[[Setup], None] | None) -> Verdict:
    """Imported when it is asked for: a diagnosis is what few checks need."""
    from equivcheck.diagnosis.explain import explained

    return explained(verdict, alter=alter)


explain_by(_explained)


def _judge(scenario: Scenario, runner: Runner, *, beyond: bool, coarse: bool) -> Verdict:
    name = runner.world if isinstance(runner.world, str) else runner.world.name
    verdict = Verdict(outcome=Outcome.EQUIVALENT, scenario=scenario, world=name)
    reason = why_unsupported(scenario, beyond=beyond)
    if reason is not None:
        return replace(verdict, outcome=Outcome.UNSUPPORTED, reason=reason)
    try:
        result = runner.run(scenario)
    except RanksFailed as error:
        return _settle(judge_failure(verdict, error.failure))
    compared_calls = _compared_calls(scenario, name, result, beyond)
    found = _held_against_one_device(verdict, result, compared_calls.divergences, coarse=coarse)
    verdict = _settle(found)
    if verdict.outcome is Outcome.KNOWN and _is_wrong_without(verdict, runner, coarse=coarse):
        verdict = found
    return replace(verdict, calls=result.run.calls, signature=signature(result.run), unmodelled=compared_calls.unmodelled)


def _is_wrong_without(verdict: Verdict, runner: Runner, *, coarse: bool) -> bool:
    """Whether the ranks are wrong as well where the issue that was taken for the reason cannot show."""
    from equivcheck.oracle.known_issues.known import known_issues

    issue = next(issue for issue in known_issues() if issue.id == verdict.known)
    avoided = issue.avoided(verdict.scenario) if issue.tried_without else None
    return avoided is not None and _judge(avoided, runner, beyond=False, coarse=coarse).outcome.is_finding


def _compared_calls(scenario: Scenario, world: str, result: RanksResult, beyond: bool) -> CallComparison:
    """The run's calls held against what is expected."""
    if beyond or scenario.resume is not None:
        return CallComparison(unmodelled=BEYOND if beyond else RESUMED)
    return compare_calls(scenario, world, result.run)


def _held_against_one_device(verdict: Verdict, result: RanksResult, calls: tuple[Divergence, ...], *, coarse: bool) -> Verdict:
    run, resume = ReferenceRun.of(verdict.scenario), verdict.scenario.resume
    far = judge_coarsely(verdict, run.coarse_reference(), result, calls) if coarse else None
    if far is not None:
        return far
    case = Case(
        reference=run.reference,
        confirming_reference=run.confirming_reference,
        required_steps=1 + (resume.steps if resume else 0),
        calls=calls,
    )
    verdict, doubt = judge(verdict, case, result)
    if verdict.outcome is Outcome.EQUIVALENT and doubt is not None:
        return replace(verdict, undecided=f"not decided from step {doubt.step} on: {doubt.reason}")
    return verdict


def _settle(verdict: Verdict) -> Verdict:
    """Mark a failure that an upstream issue on file explains."""
    if not verdict.outcome.is_finding:
        return verdict
    from equivcheck.oracle.known_issues.known import known_issue

    issue = known_issue(verdict)
    if issue is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=issue.id, reason=f"{issue.link}: {verdict.reason}")
