"""Finds the statement to blame for a failure, because later statements or a collective may be the first to report it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from equivcheck.programs.nouns.program import arguments_of
from equivcheck.programs.run.one_device import ProgramPlan
from equivcheck.programs.run.rank import REFUSED, StatementFailed, value_names
from equivcheck.programs.run.reading import PartsDisagree
from equivcheck.worlds.failure import Failure, FailureKind, RanksFailed, RankState

RAISING = re.compile(rf"{StatementFailed.__name__}: v(\d+) ")
"""Pattern in a rank's error if it raised in a statement."""
AT_ONCE = (FailureKind.MISMATCH, FailureKind.DEADLOCK)
"""Hangs detected immediately, so that more runs cost little."""


def with_culprit(plan: ProgramPlan, run: Callable[[ProgramPlan], object], failure: Failure) -> Failure:
    """Return the failure with the name of the statement or value that caused it. The program runs again to find the name.

    `run` runs a plan on all ranks. If a value's local shapes contradict its placements, this value is named. If ranks hang,
    longer and longer parts of the program run, until one hangs at its last statement. If no part hangs, the backward pass is
    named.
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


def failure_if_refusals_raise(run: Callable[[frozenset[str]], object], hung: Failure) -> Failure:
    """Run a program again to find out whether ranks hang because only some ranks refuse a statement, and the others wait.

    ``run(allowed)`` runs the program, and raises `RanksFailed` if a rank refuses a statement that is not in `allowed`. If all
    ranks refuse the same statement, it is added to `allowed`, and the program runs again. Returns a failure that names a
    statement refused by only some ranks, or `hung` if there is none.
    """
    allowed: frozenset[str] = frozenset()
    while hung.hung and all(report.state is not RankState.RUNNING for report in hung.reports):
        try:
            run(allowed)
        except RanksFailed as error:
            raised = [report.error for report in error.failure.reports if report.state is RankState.RAISED]
            # The statement comes after REFUSED; an error that is no refusal gives an empty one.
            refused = {text.partition(REFUSED)[2].partition(":")[0] for text in raised}
            if not refused or "" in refused:
                break
            if len(refused) > 1 or len(raised) < len(error.failure.reports):
                return error.failure
            allowed |= refused
        else:
            break
    return hung


def first_raising(failure: Failure | None) -> int:
    """Return the number of the first statement in which a rank raised; 0 if no rank raised."""
    errors = [report.error for report in failure.reports] if failure else []
    return min((int(found[1]) for each in errors if (found := RAISING.search(each))), default=0)


def parts_that_disagree(plan: ProgramPlan, run: Callable[[ProgramPlan], object]) -> Failure | None:
    """Run the program again, and return a failure for the first value whose local shapes contradict its placements.

    None if there is no such value.
    """
    found = _failure(run, replace(plan, checks_parts=True))
    return found if found is not None and any(PartsDisagree.__name__ in report.error for report in found.reports) else None


def _called(plan: ProgramPlan, number: int) -> str:
    """Describe a statement with its arguments, because an argument may be wrong: ``v2 exp of v1 index_add``."""
    takes = dict.fromkeys(number - back for back in arguments_of(plan.program.statements[number]))
    what, *taken = (value_names(plan, each, 1)[0] for each in (number, *takes))
    return f"{what} of {', '.join(taken)}" if taken else what


def _until(plan: ProgramPlan, number: int) -> ProgramPlan:
    kept = number + 1
    program = replace(plan.program, statements=plan.program.statements[:kept])
    return replace(plan, program=program, applies=plan.applies[:kept], outputs=plan.outputs[:kept], differentiable=False)


def _failure(run: Callable[[ProgramPlan], object], plan: ProgramPlan) -> Failure | None:
    try:
        run(plan)
    except RanksFailed as error:
        return error.failure
    return None
