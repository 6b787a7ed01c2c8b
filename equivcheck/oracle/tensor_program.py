"""`check` of a tensor program: its ranks on DTensors held against one device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivcheck.composition.running import RanksResult
from equivcheck.oracle.judge import Case, judge, judge_failure
from equivcheck.program_run.known import known_difference
from equivcheck.program_run.one_device import Plan, plan_of
from equivcheck.program_run.rank import DTensorTarget, RankResult, Refusal, run_on_rank
from equivcheck.program_run.reference import NUM_CONFIRMING, NUM_COPIES, reference_of
from equivcheck.tensor_program.program import TensorProgram
from equivcheck.verdict.description import of_divergence, of_ranks
from equivcheck.verdict.verdict import Judgement, Outcome
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.ranks import Ranks, Run, again_if_died


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerdict(Judgement):
    """What `check` returns of a tensor program."""

    program: TensorProgram
    """What was checked."""
    refusals: tuple[Refusal, ...] = ()
    """What every rank refused, clearly and alike: the program went on with what one device computes."""
    clones: tuple[int, ...] = ()
    """Statements that did not apply, and cloned their first argument."""
    known: str = ""
    """Identifier of the known upstream issue; empty unless known."""

    def describe(self) -> str:
        """A few lines for people, then the program as code."""
        heading = f"{self.outcome.value.upper()}: {self.program.name} on a mesh of {self.program.mesh}, in {self.world}"
        lines = [self._in_short()]
        if self.divergence is not None:
            lines = of_divergence(self.divergence, self.followers, self.num_unnamed)
        elif self.failure is not None:
            lines = of_ranks(self.failure)
        lines += [f"refused: statement {each.statement}: {each.text}" for each in self.refusals]
        return "\n".join([heading, *(f"  {line}" for line in lines), repr(self.program)])


def check_program(
    program: TensorProgram,
    *,
    world: str | Ranks = "sim",
    deadline: float = 60.0,
    target: type[DTensorTarget] = DTensorTarget,
) -> ProgramVerdict:
    """Say whether ranks that run a program on DTensors compute what one device computes on plain tensors.

    `world` names a world or is one of the right size, `deadline` is in seconds. `target` does statements on ranks: another is a
    way to plant a fault. Failures of the ranks are verdicts; `UsageError` is raised for a world that does not exist.
    """
    started = time.perf_counter()
    members = world if isinstance(world, Ranks) else ranks(world, program.num_ranks)
    plan = plan_of(program)
    clones = tuple(number for number, applies in enumerate(plan.applies) if not applies)
    verdict = ProgramVerdict(outcome=Outcome.EQUIVALENT, world=members.name, program=program, clones=clones)
    try:
        run = _run(members, plan, target, deadline)
    except RanksFailed as error:
        return replace(judge_failure(verdict, error.failure), seconds=time.perf_counter() - started)
    return replace(_judged(verdict, plan, run.values), seconds=time.perf_counter() - started)


def _run(members: Ranks, plan: Plan, target: type[DTensorTarget], deadline: float) -> Run:
    seed = plan.program.schedule_seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return again_if_died(
            lambda: members.run(
                run_on_rank, plan, target, schedule_seed=seed, deadline=deadline, is_foreign=target is not DTensorTarget
            )
        )


def _judged(verdict: ProgramVerdict, plan: Plan, results: Sequence[RankResult]) -> ProgramVerdict:
    places = [tuple(each.statement for each in result.refusals) for result in results]
    verdict = replace(verdict, refusals=results[0].refusals)
    if len(set(places)) > 1:
        other = next(rank for rank, each in enumerate(places) if each != places[0])
        reason = f"ranks refuse different statements: rank 0 {places[0]}, rank {other} {places[other]}"
        return replace(verdict, outcome=Outcome.CRASHED, reason=reason)
    refused = frozenset(places[0])
    case = Case(
        reference=lambda: reference_of(plan, refused, NUM_COPIES),
        confirming_reference=lambda: reference_of(plan, refused, NUM_CONFIRMING),
        required_steps=1,
    )
    return _settled(judge(verdict, case, RanksResult(run=Run(values=tuple(result.trace for result in results))))[0])


def _settled(verdict: ProgramVerdict) -> ProgramVerdict:
    """The verdict, as KNOWN where an entry on file explains it."""
    known = known_difference(verdict.program, verdict.divergence)
    if known is None:
        return verdict
    return replace(verdict, outcome=Outcome.KNOWN, known=known.id, reason=f"{known.link}: {verdict.reason}")
