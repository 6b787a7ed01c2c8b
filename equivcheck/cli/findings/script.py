"""The script of a finding, with the numbers that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.system.choice import PrintableEnum

if TYPE_CHECKING:
    from equivcheck.layouts.base.script.numbers import Numbers
    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.programs.verdict import ProgramVerdict
    from equivcheck.system.commands import FinishedCommand

DEFAULT_NAME = "repro.py"


class NumberSource(PrintableEnum):
    """Where a script takes its numbers from."""

    AUTO = "auto"
    EXACT = "exact"
    DRAWN = "drawn"


def script_text(verdict: CaseVerdict, wanted: NumberSource, *, name: str, seen_on: str) -> str:
    """The script, run once where that decides which numbers it has; raises `UsageError` for what a script cannot express."""
    from equivcheck.export.script import script_of
    from equivcheck.layouts.base.script.numbers import Numbers, choose_numbers
    from equivcheck.oracle.verdict.verdict import Verdict
    from equivcheck.programs.verdict import ProgramVerdict

    assert isinstance(verdict, Verdict | ProgramVerdict)
    if isinstance(verdict, ProgramVerdict):
        return _of_program(verdict, wanted, name, seen_on)

    def written(numbers: Numbers) -> str:
        return script_of(verdict.scenario, verdict=verdict, numbers=numbers, name=name, seen_on=seen_on)

    if wanted is not NumberSource.AUTO:
        return written(Numbers(wanted.value))
    usual = choose_numbers(verdict.scenario.training)
    if usual is Numbers.EXACT or not _is_wrong(verdict):
        return written(usual)
    click.echo("running the script once, to see whether random numbers reproduce it too ...", err=True)
    drawn = written(Numbers.DRAWN)
    return drawn if launched(drawn, verdict, name).code else written(Numbers.EXACT)


def _of_program(verdict: ProgramVerdict, wanted: NumberSource, name: str, seen_on: str) -> str:
    """The script of a tensor program, which is about its own numbers."""
    from equivcheck.programs.run.script import script_of_verdict

    if wanted is NumberSource.DRAWN:
        raise UsageError("a tensor program has its own numbers; allowed: --numbers auto or exact")
    return script_of_verdict(verdict, name=name, seen_on=seen_on)


def script_or_reason(verdict: CaseVerdict, *, seen_on: str) -> tuple[str, str]:
    """A script, or why there is none."""
    try:
        return script_text(verdict, NumberSource.AUTO, name=DEFAULT_NAME, seen_on=seen_on), ""
    except EquivCheckError as error:
        return "", str(error)


def _is_wrong(verdict: CaseVerdict) -> bool:
    return verdict.divergence is not None or verdict.failure is not None


def launched(text: str, verdict: CaseVerdict, name: str) -> FinishedCommand:
    """What comes of running a script by torchrun."""
    from equivcheck.export.launch import launch

    return launch(text, verdict.case.num_ranks, name=name)
