"""The check of a case of any kind, as campaigns ask for it."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from equivcheck.checking.beyond import check_beyond
from equivcheck.checking.check import check
from equivcheck.oracle.verdict.verdict import CaseVerdict, Verdict
from equivcheck.programs.check import check_program
from equivcheck.programs.deadline import seconds_of_program
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.rank import DTensorTarget
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Case


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
