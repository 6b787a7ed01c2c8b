"""Run `check_training` and judge the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.judge import judge, judge_failure
from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.description import failed
from equivcheck.oracle.verdict.sentences import sentence
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.tally import record
from equivcheck.user.batches import require_parts
from equivcheck.user.case import UserCase
from equivcheck.user.notes import missing_evidence, notes_on
from equivcheck.user.precision.advice import on_narrowing, on_precision
from equivcheck.user.precision.kept import require_kept
from equivcheck.user.precision.policy import precision_text, require_precision
from equivcheck.user.precision.run import RoundedRun, casting_of, exact_task
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.running import members_of, run_on
from equivcheck.user.task import Task
from equivcheck.user.usage import API
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.pool import on_first_rank
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.state.keeper import StateKeeper, kept_state
from equivcheck.worlds.world import World, without_cover


def check_task(task: Task, world: str | Ranks | World, schedule_seed: int, deadline: float, *, explain: bool) -> UserVerdict:
    """Train on one device and on ranks, and compare; see `check_training`."""
    place = without_cover(world)
    with kept_state(StateKeeper()):  # the single-device run executes user code, too
        return on_first_rank(place, lambda: _checked(task, place, schedule_seed, deadline, explain=explain))


def _checked(task: Task, world: str | Ranks, schedule_seed: int, deadline: float, *, explain: bool) -> UserVerdict:
    started = time.perf_counter()
    require_parts(task)
    require_precision(task)
    require_kept(task)
    members = members_of(task, world)
    original = SingleDeviceRun(task if task.precision is None else exact_task(task))
    in_short = str(original.precision).removeprefix("torch.") if task.precision is None else precision_text(task)
    verdict = UserVerdict(outcome=Outcome.EQUIVALENT, mesh=task.mesh, world=members.name, precision=in_short)
    left, ran = run_on(members, task, schedule_seed, deadline)
    verdict = replace(verdict, world=ran.name, notes=notes_on(task, left, members, ran))
    if isinstance(left, Failure):
        _raise_usage(left)
        verdict = judge_failure(verdict, left)
        if explain:
            from equivcheck.user.diagnosis.typed import opinion_of_types

            verdict = replace(verdict, types=opinion_of_types(task))
    else:
        run = original if task.precision is None else RoundedRun(task, original, casting_of(left.values))
        verdict = _judged(verdict, run, RanksResult(run=left), explain=explain and task.precision is None)
        advice = (*on_narrowing(run), *on_precision(task, left.values, verdict.outcome))
        verdict = replace(verdict, notes=(*verdict.notes, *advice))
    record(API, verdict.world, verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _judged(verdict: UserVerdict, original: SingleDeviceRun, result: RanksResult, *, explain: bool) -> UserVerdict:
    case = UserCase(original, result.run.values)
    verdict, doubt = judge(verdict, case.judge_case(), result)
    verdict = replace(verdict, unread=case.unread, measures=case.measures(result.run.calls))
    if verdict.divergence is not None:
        hinted = replace(verdict, hint=case.hint(verdict.divergence))
        return with_cause(hinted, original, case.confirming_reference, result.run.values) if explain else hinted
    other = case.other_settings
    if other is not None:
        return replace(verdict, outcome=Outcome.DIVERGED, reason=sentence(other), divergence=other)
    missing = missing_evidence(original.task, changes_parameters=original.changes_parameters)
    if original.task.precision is not None and verdict.outcome is Outcome.EQUIVALENT:
        missing = missing or case.apart_in_parts
    if verdict.outcome is Outcome.EQUIVALENT and missing:
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=missing)
    if doubt is not None and doubt.step:
        return replace(verdict, reason=f"{verdict.reason}; all steps before step {doubt.step} agree")
    return verdict


def with_cause(verdict: UserVerdict, run: SingleDeviceRun, reference: Reference, traces: Sequence[Any]) -> UserVerdict:
    """Add cause or pattern, first wrong module and type checker's result. An exception on the way becomes a note."""
    # Imported here because most trainings are right.
    from equivcheck.user.diagnosis.diverged import diverged_training
    from equivcheck.user.diagnosis.explain import explanation_of
    from equivcheck.user.diagnosis.typed import opinion_of_types
    from equivcheck.user.diagnosis.where import where_of

    verdict = replace(verdict, types=opinion_of_types(run.task))
    try:
        diverged = diverged_training(run.task, reference, run.trace, traces, run.eps)
        if diverged is None:
            return verdict
        found, where = explanation_of(diverged), where_of(diverged)
    except Exception as error:
        return replace(verdict, notes=(*verdict.notes, failed("looking for the cause", error)))
    hint = "" if found.cause else "; ".join(filter(None, (verdict.hint, found.pattern)))
    return replace(verdict, cause=found.cause, kinds=found.kinds, where=where, hint=hint)


def _raise_usage(failure: Failure) -> None:
    """Raise a `UsageError` that a rank raised, because an invalid argument is not a failure of the training."""
    for report in failure.reports:
        kind, _, text = report.error.partition(": ")
        if kind.endswith(UsageError.__name__) and text.startswith(f"{API}: "):
            raise UsageError(text) from None
