"""Verdict classes, by the kind of case: scenario or tensor program."""

from __future__ import annotations

from typing import Any

from equivcheck.oracle.verdict.verdict import CaseVerdict, Verdict
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.file_format.codec import CASE

VERDICTS: dict[type, tuple[type[CaseVerdict], str]] = {Scenario: (Verdict, CASE), TensorProgram: (ProgramVerdict, "program")}
"""Verdict class by case class, and its field name for the case."""


def verdict_on(case: Checkable, **values: Any) -> CaseVerdict:
    """Build the verdict on a case: a `Verdict` for a scenario, a `ProgramVerdict` for a tensor program.

    `values` are the verdict's other fields.
    """
    verdict, field = VERDICTS[type(case)]
    return verdict(**{field: case, **values})


def num_steps(case: Checkable) -> int:
    """Return the number of steps in which the case can diverge."""
    return case.training.steps if isinstance(case, Scenario) else 1
