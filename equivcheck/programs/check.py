"""Checks a tensor program: compares DTensors on ranks with plain tensors on one device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from equivcheck.layouts.base.execution.compile_time import COMPILE_SECONDS
from equivcheck.layouts.composition.running import PROCESSES, THREADS, RanksResult
from equivcheck.oracle.judge import ExpectedRun, judge, judge_failure
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.blame import failure_if_refusals_raise, first_raising, parts_that_disagree, with_culprit
from equivcheck.programs.nouns.program import MAX_STATEMENTS, Operation, TensorProgram
from equivcheck.programs.run.cache import cached_plan, cached_reference
from equivcheck.programs.run.known.difference import KnownDifference
from equivcheck.programs.run.known.on_file import known_difference
from equivcheck.programs.run.one_device import ProgramPlan
from equivcheck.programs.run.rank import DTensorTarget, RankResult, run_on_rank
from equivcheck.programs.run.reference import NUM_CONFIRMING, NUM_COPIES
from equivcheck.programs.run.targets import target_of
from equivcheck.programs.verdict import BACKWARD, ProgramVerdict, Refusal
from equivcheck.worlds.failure import Failure, RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Ranks, Run, rerun_if_died
from equivcheck.worlds.trace.differences import Phase

Known = Callable[[TensorProgram, ProgramVerdict], KnownDifference | None]
"""Function that returns the known error of torch that explains a verdict, if there is one."""


def check_program(
    program: TensorProgram,
    *,
    world: str | Ranks = "sim",
    deadline: float = 60.0,
    target: str | type[DTensorTarget] = "dtensor",
    only_sinks: bool = False,
) -> ProgramVerdict:
    """Check whether ranks with a tensor program on DTensors compute the same as one device with plain tensors.

    `world` is a world's name, or a world with as many ranks as the program's mesh. `deadline` is in seconds. `target` says how
    ranks run statements: a name in `TARGETS`, or a class, for example with a planted bug. A target that compiles runs in gloo
    instead of sim. With `only_sinks`, ranks read only values that no statement takes as an argument.

    If a gradient differs, the program runs again, and the verdict names the first wrong gradient in the backward pass. If a value
    differs, the program runs again to find the first value whose local shapes contradict its placements. If a rank raises after a
    value has differed, the verdict reports this value. A failure on a rank gives a verdict, not an exception. Raises `UsageError`
    for an unknown world or target.
    """
    started = time.perf_counter()
    on = target_of(target) if isinstance(target, str) else target
    name = PROCESSES if on.needs_processes and world == THREADS else world
    members = name if isinstance(name, Ranks) else ranks(name, program.num_ranks)
    if on.needs_processes:
        members.prepare_to_compile()
    # If warnings were errors, statements that warn would not apply on one device.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = replace(cached_plan(program), fills_gradients=on.fills_gradients, only_sinks=only_sinks)
        seconds = deadline + COMPILE_SECONDS * on.needs_processes
        verdict = _with_first_gradient(plan, lambda each: _verdict(members, each, on, seconds))
        known = known_difference if on.runs_on_dtensors else _no_known_difference
        verdict = _as_known(verdict, known(program, verdict))
        if _phase(verdict) is Phase.VALUE and verdict.outcome is Outcome.DIVERGED:
            apart = parts_that_disagree(plan, lambda each: _run(members, each, on, seconds))
            verdict = verdict if apart is None else _with_first_bad_part(verdict, apart, known)
        verdict = _with_types(verdict, on.type_errors(plan))
    return replace(verdict, seconds=time.perf_counter() - started)


def _with_first_gradient(plan: ProgramPlan, verdict_of: Callable[[ProgramPlan], ProgramVerdict]) -> ProgramVerdict:
    """If a leaf's gradient differs, compare all values' gradients to find the first difference."""
    verdict = verdict_of(plan)
    if _phase(verdict) is not Phase.GRADIENT:
        return verdict
    again = verdict_of(replace(plan, every_gradient=True))
    return again if _phase(again) is Phase.GRADIENT else verdict


def _phase(verdict: ProgramVerdict) -> Phase | None:
    return None if verdict.divergence is None else verdict.divergence.phase


def _verdict(members: Ranks, plan: ProgramPlan, target: type[DTensorTarget], deadline: float) -> ProgramVerdict:
    clones = tuple(number for number, applies in enumerate(plan.applies) if not applies)
    verdict = ProgramVerdict(outcome=Outcome.EQUIVALENT, world=members.name, program=plan.program, clones=clones)
    try:
        run = _run(members, plan, target, deadline)
    except RanksFailed as error:
        failure = failure_if_refusals_raise(lambda raising: _run(members, plan, target, deadline, raising), error.failure)
        blamed = judge_failure(verdict, with_culprit(plan, lambda shorter: _run(members, shorter, target, deadline), failure))
        return _with_values_before(blamed, lambda shorter: _verdict(members, shorter, target, deadline))
    return _judged(verdict, plan, run.values)


def _with_values_before(verdict: ProgramVerdict, verdict_of: Callable[[ProgramPlan], ProgramVerdict]) -> ProgramVerdict:
    """If ranks raise in a statement although an earlier value already differs, return the verdict on that value."""
    number = first_raising(verdict.failure)
    before = verdict.program.statements[:number]
    if not any(isinstance(each, Operation) for each in before):
        return verdict
    found = verdict_of(cached_plan(replace(verdict.program, statements=before)))
    if _phase(found) is not Phase.VALUE:
        return verdict
    return replace(found, program=verdict.program, clones=verdict.clones, reason=f"{found.reason}; then: {verdict.reason}")


def _run(
    members: Ranks, plan: ProgramPlan, target: type[DTensorTarget], deadline: float, raising: frozenset[str] | None = None
) -> Run:
    seed, is_user_code = plan.program.schedule_seed, target is not DTensorTarget
    return rerun_if_died(
        lambda: members.run(run_on_rank, plan, target, raising, schedule_seed=seed, deadline=deadline, is_user_code=is_user_code)
    )


def _judged(verdict: ProgramVerdict, plan: ProgramPlan, results: Sequence[RankResult]) -> ProgramVerdict:
    places = [tuple((each.statement, each.kind) for each in result.refusals) for result in results]
    verdict = replace(verdict, refusals=results[0].refusals)
    if len(set(places)) > 1:
        return replace(verdict, outcome=Outcome.CRASHED, reason=_first_disagreement(plan, results))
    refused = frozenset(each.statement for each in results[0].refusals)
    case = ExpectedRun(
        reference=lambda: cached_reference(plan, refused, NUM_COPIES),
        confirming_reference=lambda: cached_reference(plan, refused, NUM_CONFIRMING),
        required_steps=1,
    )
    return judge(verdict, case, RanksResult(run=Run(values=tuple(result.trace for result in results))))[0]


def _first_disagreement(plan: ProgramPlan, results: Sequence[RankResult]) -> str:
    first, rank = min(
        (
            (each, rank)
            for rank, result in enumerate(results)
            for each in result.refusals
            if not all(_refuses(result, each) for result in results)
        ),
        key=lambda found: found[0].statement % MAX_STATEMENTS,
    )
    others = [number for number, result in enumerate(results) if not _refuses(result, first)]
    where = "backward" if first.statement == BACKWARD else f"v{first.statement} {plan.display_name(first.statement)}"
    return f"{where}: rank {rank} refuses it ({first.text}), ranks {others} do not, or raise another error"


def _refuses(result: RankResult, refusal: Refusal) -> bool:
    return (refusal.statement, refusal.kind) in [(each.statement, each.kind) for each in result.refusals]


def _with_types(verdict: ProgramVerdict, types: str) -> ProgramVerdict:
    """Add the type checker's errors. If the checker rejects a correct program, either the checker or the program is wrong."""
    if not types or verdict.outcome is not Outcome.EQUIVALENT:
        return replace(verdict, types=types)
    reason = f"the type checker rejects a correct program: {types.splitlines()[0]}"
    return replace(verdict, types=types, outcome=Outcome.CRASHED, reason=reason)


def _with_first_bad_part(verdict: ProgramVerdict, apart: Failure, known: Known) -> ProgramVerdict:
    """Add the first value whose local shapes contradict its placements. Reading such a value gives meaningless numbers."""
    with_reason = replace(verdict, reason=f"{verdict.reason}; earlier: {apart.summary}")
    return _as_known(with_reason, known(verdict.program, judge_failure(replace(verdict, divergence=None), apart)))


def _no_known_difference(_program: TensorProgram, _verdict: ProgramVerdict) -> None:
    """On plain tensors, no DTensor error explains a finding."""


def _as_known(verdict: ProgramVerdict, known: KnownDifference | None) -> ProgramVerdict:
    if known is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=known.id, reason=f"{known.link}: {verdict.reason}")
