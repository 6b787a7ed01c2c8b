"""Checks a scenario or a tensor program, as campaigns need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from equivcheck.checking.beyond import check_beyond
from equivcheck.checking.check import check
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import seconds_of_program
from equivcheck.programs.nouns import TensorProgram
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Checkable


def check_case(  # noqa: PLR0913 - options, all by keyword
    case: Checkable, *, world: str, deadline: float, alter: Any = None, coarse: bool = False, beyond: bool = False
) -> CaseVerdict:
    """Check a case, and return its verdict without recorded collective calls, so that it is small enough to send.

    `alter` plants a bug. For a scenario, it is a function that changes a rank's `Setup`. For a tensor program, it is a target
    with a bug, used in place of the usual target. `coarse` and `beyond` have the same meaning as in `check`, and apply to
    scenarios only.
    """
    if isinstance(case, TensorProgram):
        limit = seconds_of_program(case, world, deadline)
        if alter is None:
            return check(case, world=world, deadline=limit)
        return check_program(case, world=world, deadline=limit, target=alter)
    if not isinstance(case, Scenario):
        raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")
    if beyond:
        return replace(check_beyond(case, world=world, deadline=deadline, coarse=coarse), calls=())
    return replace(check(case, world=world, deadline=deadline, alter=alter, coarse=coarse), calls=())
