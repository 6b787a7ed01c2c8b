"""The check of a case of any kind, as campaigns ask for it."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from equivcheck.composition.running import THREADS
from equivcheck.oracle.beyond import check_beyond
from equivcheck.oracle.check import check
from equivcheck.oracle.tensor_program import check_program
from equivcheck.program_run.facts import NO_ELEMENTS, facts_of
from equivcheck.program_run.rank import DTensorTarget
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Case
from equivcheck.tensor_program import TensorProgram
from equivcheck.tensor_program.operations.matmul import WEIGHED
from equivcheck.verdict.program import ProgramVerdict
from equivcheck.verdict.verdict import CaseVerdict, Verdict

USUAL_DEADLINE = 30.0
"""Seconds: the deadline of a campaign's checks, unless another is asked for."""
PROGRAM_SECONDS = 10.0
"""A deadline for programs, which compute for milliseconds, where cases have the usual one.

DTensor weighs placements of a norm by groups for up to 2.5 s of CPU time on a slow machine.
"""
SECONDS_WITHOUT_ELEMENTS = 1.0
"""And where a leaf has no elements, and ranks are threads.

Torch computes of the views of some without an end, which took a third of a sweep.
"""


@singledispatch
def check_case(case: Case, **options: Any) -> CaseVerdict:  # noqa: ARG001
    """The verdict, without calls, as it goes to another process; `options` are `world`, `deadline`, and three more.

    `alter` plants a fault: a function of a rank's setup for scenarios, a target for tensor programs. `coarse` is that of `check`,
    and with `beyond` limits of torch do not count, as in `check_beyond`: programs have neither.
    """
    raise TypeError(f"{type(case).__name__} is no case")


@check_case.register
def _(  # noqa: PLR0913
    case: Scenario, *, world: str, deadline: float, alter: Any = None, coarse: bool = False, beyond: bool = False
) -> Verdict:
    if beyond:
        return replace(check_beyond(case, world=world, deadline=deadline, coarse=coarse), calls=())
    return replace(check(case, world=world, deadline=deadline, alter=alter, coarse=coarse), calls=())


@check_case.register
def _(
    case: TensorProgram, *, world: str, deadline: float, alter: type[DTensorTarget] | None = None, **_options: bool
) -> ProgramVerdict:
    limit = seconds_of_program(case, world, deadline)
    if alter is None:
        return check(case, world=world, deadline=limit)
    return check_program(case, world=world, deadline=limit, target=alter)


def seconds_of_program(program: TensorProgram, world: str, deadline: float) -> float:
    """A deadline of programs: longer where cases have longer than usual, as those that are checked again with more time.

    One that DTensor takes ten seconds of CPU time for has as long as any case.
    """
    if WEIGHED in program.operations:
        return deadline
    is_short = world == THREADS and NO_ELEMENTS in facts_of(program)
    usual = SECONDS_WITHOUT_ELEMENTS if is_short else PROGRAM_SECONDS
    return min(deadline, usual * max(1.0, deadline / USUAL_DEADLINE))
