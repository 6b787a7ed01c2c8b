"""`check` of a tensor program: its ranks on DTensors held against one device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from equivcheck.composition.running import RanksResult
from equivcheck.oracle.judge import Case, judge, judge_failure
from equivcheck.program_run.on_file import known_difference
from equivcheck.program_run.one_device import Plan, plan_of
from equivcheck.program_run.rank import DTensorTarget, RankResult, run_on_rank
from equivcheck.program_run.reference import NUM_CONFIRMING, NUM_COPIES, reference_of
from equivcheck.tensor_program.program import TensorProgram
from equivcheck.trace.differences import Phase
from equivcheck.verdict.program import BACKWARD, ProgramVerdict
from equivcheck.verdict.verdict import Outcome
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Ranks, Run, again_if_died


def check_program(
    program: TensorProgram,
    *,
    world: str | Ranks = "sim",
    deadline: float = 60.0,
    target: type[DTensorTarget] = DTensorTarget,
) -> ProgramVerdict:
    """Say whether ranks that run a program on DTensors compute what one device computes on plain tensors.

    `world` names a world or is one of the right size, `deadline` is in seconds. `target` does statements on ranks: another is a
    way to plant a fault. Where a gradient differs, the program runs once more, and of all gradients the first that differs in the
    backward pass is told. Failures of the ranks are verdicts; `UsageError` is raised for a world that does not exist.
    """
    started = time.perf_counter()
    with warnings.catch_warnings():  # where they are errors, what warns on one device would not apply
        warnings.simplefilter("ignore")
        members = world if isinstance(world, Ranks) else ranks(world, program.num_ranks)
        plan = plan_of(program)
        verdict = _verdict(members, plan, target, deadline)
        if verdict.divergence is not None and verdict.divergence.phase is Phase.GRADIENT:
            again = _verdict(members, replace(plan, every_gradient=True), target, deadline)
            if again.divergence is not None and again.divergence.phase is Phase.GRADIENT:
                verdict = again
    return replace(_settled(verdict), seconds=time.perf_counter() - started)


def _verdict(members: Ranks, plan: Plan, target: type[DTensorTarget], deadline: float) -> ProgramVerdict:
    clones = tuple(number for number, applies in enumerate(plan.applies) if not applies)
    verdict = ProgramVerdict(outcome=Outcome.EQUIVALENT, world=members.name, program=plan.program, clones=clones)
    try:
        run = _run(members, plan, target, deadline)
    except RanksFailed as error:
        return judge_failure(verdict, error.failure)
    return _judged(verdict, plan, run.values)


def _run(members: Ranks, plan: Plan, target: type[DTensorTarget], deadline: float) -> Run:
    seed = plan.program.schedule_seed
    is_foreign = target is not DTensorTarget
    return again_if_died(
        lambda: members.run(run_on_rank, plan, target, schedule_seed=seed, deadline=deadline, is_foreign=is_foreign)
    )


def _judged(verdict: ProgramVerdict, plan: Plan, results: Sequence[RankResult]) -> ProgramVerdict:
    places = [tuple(each.statement for each in result.refusals) for result in results]
    verdict = replace(verdict, refusals=results[0].refusals)
    if len(set(places)) > 1:
        other = next(rank for rank, each in enumerate(places) if each != places[0])
        told = ", ".join(f"rank {rank} {_refused(plan, places[rank])}" for rank in (0, other))
        reason = f"ranks refuse different statements: {told}"
        return replace(verdict, outcome=Outcome.CRASHED, reason=reason)
    refused = frozenset(places[0])
    case = Case(
        reference=lambda: reference_of(plan, refused, NUM_COPIES),
        confirming_reference=lambda: reference_of(plan, refused, NUM_CONFIRMING),
        required_steps=1,
    )
    return judge(verdict, case, RanksResult(run=Run(values=tuple(result.trace for result in results))))[0]


def _refused(plan: Plan, places: tuple[int, ...]) -> str:
    names = ("backward" if place == BACKWARD else f"v{place} {plan.called(place)}" for place in places)
    return ", ".join(names) or "none"


def _settled(verdict: ProgramVerdict) -> ProgramVerdict:
    """The verdict, as KNOWN where an entry on file explains it."""
    known = known_difference(verdict.program, verdict)
    if known is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=known.id, reason=f"{known.link}: {verdict.reason}")
