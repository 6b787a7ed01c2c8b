"""Ranks that wait for each other: in which statement, which neither a collective nor a stack says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.program_run.one_device import Plan
from equivcheck.program_run.rank import value_names
from equivcheck.tensor_program.statements import arguments_of
from equivcheck.worlds.failure import Failure, FailureKind, RanksFailed

AT_ONCE = (FailureKind.MISMATCH, FailureKind.DEADLOCK)
"""Kinds of hangs that are known as they happen, so that more runs cost little."""


def told_where(plan: Plan, run: Callable[[Plan], object], failure: Failure) -> Failure:
    """The failure with the first statement in which ranks wait, found by `run` of ever more of them; else the backward."""
    if failure.kind not in AT_ONCE:
        return failure
    first = next((number for number in range(len(plan.program.statements)) if _hangs(run, _until(plan, number))), None)
    where = "backward" if first is None else _called(plan, first)
    return replace(failure, summary=f"{where}: {failure.summary}")


def _called(plan: Plan, number: int) -> str:
    """A statement, and what it takes, which may be what is wrong: ``v2 exp of v1 index_add``."""
    takes = dict.fromkeys(number - back for back in arguments_of(plan.program.statements[number]))
    what, *taken = (value_names(plan, each, 1)[0] for each in (number, *takes))
    return f"{what} of {', '.join(taken)}" if taken else what


def _until(plan: Plan, number: int) -> Plan:
    """The program up to a statement, without a backward."""
    kept = number + 1
    program = replace(plan.program, statements=plan.program.statements[:kept])
    return replace(plan, program=program, applies=plan.applies[:kept], outputs=plan.outputs[:kept], differentiable=False)


def _hangs(run: Callable[[Plan], object], plan: Plan) -> bool:
    try:
        run(plan)
    except RanksFailed as error:
        return error.failure.kind in AT_ONCE
    return False
