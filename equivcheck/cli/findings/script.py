"""Writes and runs torch-only scripts for reproducing findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.system.choice import PrintableEnum

if TYPE_CHECKING:
    from equivcheck.layouts.base.script.numbers import Numbers
    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.system.commands import FinishedCommand

DEFAULT_NAME = "repro.py"


class NumberSource(PrintableEnum):
    """Source of a script's weights and inputs: the training itself, or a random generator."""

    AUTO = "auto"
    EXACT = "exact"
    DRAWN = "drawn"


def script_text(verdict: CaseVerdict, wanted: NumberSource, *, name: str, seen_on: str) -> str:
    """Return a script that reproduces the verdict with torch only. The script's docstring names the torch version `seen_on`.

    `wanted` chooses the source of weights and inputs. With AUTO, the script may run once to choose it. Raises `UsageError` if no
    script can express the case.
    """
    from equivcheck.export.script import script_of
    from equivcheck.layouts.base.script.numbers import Numbers, choose_numbers
    from equivcheck.oracle.verdict.verdict import Verdict
    from equivcheck.programs.verdict import ProgramVerdict

    assert isinstance(verdict, Verdict | ProgramVerdict)
    if isinstance(verdict, ProgramVerdict):
        from equivcheck.programs.run.script import script_of_verdict

        if wanted is NumberSource.DRAWN:
            raise UsageError(
                "--numbers drawn is not valid: it is for trainings, and this is a tensor program. Expected auto or exact"
            )
        return script_of_verdict(verdict, name=name, seen_on=seen_on)

    def script_with(numbers: Numbers) -> str:
        return script_of(verdict.scenario, verdict=verdict, numbers=numbers, name=name, seen_on=seen_on)

    if wanted is not NumberSource.AUTO:
        return script_with(Numbers(wanted.value))
    usual = choose_numbers(verdict.scenario.training)
    if usual is Numbers.EXACT or (verdict.divergence is None and verdict.failure is None):
        return script_with(usual)
    click.echo("running the script once, because random numbers may not reproduce the finding ...", err=True)
    drawn = script_with(Numbers.DRAWN)
    return drawn if run_with_torchrun(drawn, verdict, name).code else script_with(Numbers.EXACT)


def script_or_reason(verdict: CaseVerdict, *, seen_on: str) -> tuple[str, str]:
    """Return a script that reproduces the verdict with torch only, and an empty text.

    If there is no such script, return an empty text and the reason.
    """
    try:
        return script_text(verdict, NumberSource.AUTO, name=DEFAULT_NAME, seen_on=seen_on), ""
    except EquivCheckError as error:
        return "", str(error)


def run_with_torchrun(text: str, verdict: CaseVerdict, name: str) -> FinishedCommand:
    """Run the script `text` with torchrun, on the ranks of the verdict's case. `name` is its file name."""
    from equivcheck.export.launch import launch

    return launch(text, verdict.case.num_ranks, name=name)
