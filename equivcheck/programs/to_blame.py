"""Which statement is to blame where ranks raise, wait or differ: neither what follows later nor a collective says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from equivcheck.programs.nouns.statements import arguments_of
from equivcheck.programs.run.one_device import Plan
from equivcheck.programs.run.rank import StatementFailed, value_names
from equivcheck.programs.run.reading import PartsDisagree
from equivcheck.worlds.failure import Failure, FailureKind, RanksFailed

RAISING = re.compile(rf"{StatementFailed.__name__}: v(\d+) ")
"""What the error of a rank says that raised in a statement."""
AT_ONCE = (FailureKind.MISMATCH, FailureKind.DEADLOCK)
"""Kinds of hangs that are known as they happen, so that more runs cost little."""


def with_blame(plan: Plan, run: Callable[[Plan], object], failure: Failure) -> Failure:
    """The failure with the operation or the statement to blame, where that is found by `run` of the program once more.

    If a rank's part of a value is not as its placements say, that value is. Where ranks wait, it is the first statement, of ever
    more that run, in which they do; else the backward.
    """
    if failure.kind not in (*AT_ONCE, FailureKind.RAISED):
        return failure
    apart = parts_that_disagree(plan, run)
    if apart is not None:
        return apart
    if failure.kind is FailureKind.RAISED:
        return failure
    numbers = range(len(plan.program.statements))
    first = next((each for each in numbers if (found := _failure(run, _until(plan, each))) and found.kind in AT_ONCE), None)
    where = "backward" if first is None else _called(plan, first)
    return replace(failure, summary=f"{where}: {failure.summary}")


def first_raising(failure: Failure | None) -> int:
    """The first statement in which a rank raised; 0 if none did in a statement."""
    errors = [report.error for report in failure.reports] if failure else []
    return min((int(found[1]) for each in errors if (found := RAISING.search(each))), default=0)


def parts_that_disagree(plan: Plan, run: Callable[[Plan], object]) -> Failure | None:
    """What `run` of the program says of the first value whose parts are not as its placements say; None where all are."""
    found = _failure(run, replace(plan, checks_parts=True))
    return found if found is not None and any(PartsDisagree.__name__ in report.error for report in found.reports) else None


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


def _failure(run: Callable[[Plan], object], plan: Plan) -> Failure | None:
    try:
        run(plan)
    except RanksFailed as error:
        return error.failure
    return None
