"""`check`: one scenario or tensor program in, one verdict out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.composition.running import RanksResult, Runner, world_for
from equivcheck.oracle.comparison.communication import CallComparison, compare_calls
from equivcheck.oracle.judge import ExpectedRun, judge, judge_coarsely, judge_failure
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.verdict import Outcome, Verdict, explain_by
from equivcheck.scenario import Scenario
from equivcheck.system.tally import IN_PART, record_check
from equivcheck.training.setup import Setup
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import on_first_rank
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.signature import signature
from equivcheck.worlds.trace.differences import Divergence
from equivcheck.worlds.world import World, unwrap_world

if TYPE_CHECKING:
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.programs.verdict import ProgramVerdict

BEYOND = "no calls are predicted beyond the limits of a layout"
"""Reason why calls are not compared with predictions if torch's known limits are ignored."""
RESUMED = "calls that save and load a checkpoint are not predicted"
"""Reason why calls are not compared with predictions if the first steps ran under another layout."""


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
    """Check whether parallel training, or a tensor program on ranks, computes the same as a single device.

    `world` is the name of a world, or a `World` with as many ranks as the scenario. In ``torchrun``, every process calls `check`;
    rank 0 judges, and all ranks return its verdict. A scenario that compiles runs in gloo instead of sim, and the verdict says
    so. Ranks count as hung after `deadline` seconds of waiting, or of computing without communication; compiling adds at least
    150 s. `alter` is called with each rank's setup after the layout was applied, for example to plant a fault. `beyond` ignores
    torch's known limits, and does not compare collective calls with predictions. `coarse` is faster and meant for shrinking: an
    error far above any rounding noise counts as DIVERGED without measuring the noise. The same scenario may be INCONCLUSIVE in a
    check without `coarse`.

    `alter`, `beyond` and `coarse` do not apply to a tensor program. Its `target` is ``dtensor``, ``plain`` (plain tensors with
    functional collectives), ``typed`` (with collectives from spmd_types) or ``compiled`` (DTensors, each operation under
    `torch.compile`, in gloo). If ranks fail, the verdict says so. An unknown world or target raises `UsageError`.
    """
    if not isinstance(scenario, Scenario):
        from equivcheck.programs.check import check_program

        place = unwrap_world(world)
        return on_first_rank(place, lambda: check_program(scenario, world=place, deadline=deadline, target=target))
    started = time.perf_counter()
    runner = Runner(world=world_for(scenario, unwrap_world(world)), deadline=deadline, alter=alter)
    verdict = on_first_rank(runner.world, lambda: _judge(scenario, runner, beyond=beyond, coarse=coarse))
    record_check(scenario.layout.name, verdict.world, IN_PART if verdict.undecided else verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _explained(verdict: Verdict, alter: Callable[[Setup], None] | None) -> Verdict:
    # Imported at first use, because few checks need a diagnosis.
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
        return _marked_known(judge_failure(verdict, error.failure))
    if beyond or scenario.resume is not None:
        compared_calls = CallComparison(unmodelled=BEYOND if beyond else RESUMED)
    else:
        compared_calls = compare_calls(scenario, name, result.run)
    found = _compared_with_reference(verdict, result, compared_calls.divergences, coarse=coarse)
    verdict = _marked_known(found)
    if verdict.outcome is Outcome.KNOWN and _fails_without_issue(verdict, runner, coarse=coarse):
        verdict = found
    return replace(verdict, calls=result.run.calls, signature=signature(result.run), unmodelled=compared_calls.unmodelled)


def _fails_without_issue(verdict: Verdict, runner: Runner, *, coarse: bool) -> bool:
    """Whether ranks still fail after the scenario was changed to avoid the known issue."""
    from equivcheck.oracle.known_issues.known import known_issues

    issue = next(issue for issue in known_issues() if issue.id == verdict.known)
    avoided = issue.avoid(verdict.scenario) if issue.tried_without else None
    return avoided is not None and _judge(avoided, runner, beyond=False, coarse=coarse).outcome.is_finding


def _compared_with_reference(verdict: Verdict, result: RanksResult, calls: tuple[Divergence, ...], *, coarse: bool) -> Verdict:
    run, resume = ReferenceRun.of(verdict.scenario), verdict.scenario.resume
    far = judge_coarsely(verdict, run.coarse_reference(), result, calls) if coarse else None
    if far is not None:
        return far
    case = ExpectedRun(
        reference=run.reference,
        confirming_reference=run.confirming_reference,
        required_steps=1 + (resume.steps if resume else 0),
        calls=calls,
    )
    verdict, doubt = judge(verdict, case, result)
    if verdict.outcome is Outcome.EQUIVALENT and doubt is not None:
        return replace(verdict, undecided=f"not decided from step {doubt.step} on: {doubt.reason}")
    return verdict


def _marked_known(verdict: Verdict) -> Verdict:
    """Return the verdict, changed to KNOWN if a known issue explains the failure."""
    if not verdict.outcome.is_finding:
        return verdict
    from equivcheck.oracle.known_issues.known import known_issue

    issue = known_issue(verdict)
    if issue is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=issue.id, reason=f"{issue.summary}: {verdict.reason}")
