"""`equivcheck check`: check one case from a file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.options import (
    confirm_option,
    console,
    deadline_option,
    html_option,
    json_option,
    print_json,
    world_option,
    write_page,
)
from equivcheck.cli.shell import ExitCode
from equivcheck.cli.standing import on_all_ranks
from equivcheck.errors import UsageError
from equivcheck.system.files import read_stream, read_text
from equivcheck.system.streams import standard_input
from equivcheck.worlds.pool import TORCHRUN

if TYPE_CHECKING:
    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.scenario import Scenario


@click.command()
@click.argument("file", type=click.Path(path_type=str))
@world_option("sim", "How ranks run; torchrun: each process that torchrun started is a rank.", may_stand=True)
@deadline_option(60.0)
@click.option("--comm", is_flag=True, help="Also show the collectives of the ranks and the expected ones.")
@click.option("--beyond", is_flag=True, help="Ignore known limits of torch: the run must be correct or fail on every rank.")
@confirm_option
@json_option
@html_option
def check(  # noqa: PLR0913, PLR0917 - options
    file: str, world: str, deadline: float, comm: bool, beyond: bool, confirm: bool, as_json: bool, html: Path | None
) -> ExitCode:
    """Check the scenario or tensor program in a JSON FILE.

    FILE is - for standard input. With --html, the ranks run once more. The page shows their tensors and calls, and the losses and
    errors of each step.
    """

    def check_and_print() -> ExitCode:
        verdict = _check(read_case(file), world, deadline, comm=comm, beyond=beyond, confirm=confirm, as_json=as_json)
        write_page(html, lambda page: _write_page(page, verdict, file, deadline))
        return ExitCode.FINDINGS if verdict.outcome.is_finding else ExitCode.NOTHING_FOUND

    if world != TORCHRUN:
        return check_and_print()
    if html is not None:
        raise UsageError(
            f"--html is not valid with --world {TORCHRUN}: the page needs a second run of the ranks. Expected another world"
        )
    return on_all_ranks(check_and_print)


def _check(  # noqa: PLR0913
    case: Scenario | TensorProgram, world: str, deadline: float, *, comm: bool, beyond: bool, confirm: bool, as_json: bool
) -> CaseVerdict:
    from equivcheck.checking.beyond import check_beyond
    from equivcheck.checking.check import check as check_within
    from equivcheck.checking.confirm import CONFIRMING, confirmed_by, may_be_confirmed
    from equivcheck.scenario import Scenario

    if (comm or beyond) and not isinstance(case, Scenario):
        raise UsageError("--comm or --beyond is not valid with a tensor program. Expected a file with a scenario")
    check_case: Callable[..., Any] = check_beyond if beyond else check_within
    verdict: Any = check_case(case, world=world, deadline=deadline)
    if verdict.outcome.is_finding and not verdict.beyond:
        from equivcheck.diagnosis.explain import explained  # slow import of all mutants, which only a finding needs

        verdict = explained(verdict, deadline=deadline)
    if confirm and may_be_confirmed(verdict):
        verdict = confirmed_by(verdict, lambda: check_case(case, world=CONFIRMING, deadline=deadline))
    _print(verdict, comm=comm, as_json=as_json)
    result: CaseVerdict = verdict
    return result


def _print(verdict: Any, *, comm: bool, as_json: bool) -> None:
    if as_json:
        from equivcheck.campaign.findings.finding import communication_object, verdict_object

        print_json(verdict_object(verdict) | ({"communication": communication_object(verdict)} if comm else {}))
        return
    from equivcheck.report.verdict_text import print_verdict

    print_verdict(console(), verdict)
    if comm:
        from equivcheck.report.communication_text import print_communication

        print_communication(console(), verdict)


def _write_page(page: Path, verdict: CaseVerdict, file: str, deadline: float) -> None:
    from equivcheck.cli.findings.script import script_or_reason
    from equivcheck.report.finding_page.page import PageContext
    from equivcheck.report.finding_page.page import write_page as write
    from equivcheck.report.finding_page.second_run import run_once_more

    script, why = script_or_reason(verdict, seen_on="")
    named = shlex.quote("case.json" if file == "-" else file)
    commands = (f"equivcheck check {named}", f"equivcheck export {named} -o repro.py")
    again = partial(run_once_more, deadline=deadline)
    write(verdict, page, PageContext(script=script, why_no_script=why, commands=commands), again)


def read_case(file: str) -> Scenario | TensorProgram:
    """Read a scenario or tensor program from a JSON file, or from standard input for ``-``.

    Raises `UsageError` if there is no such file, and `InvalidScenario` for wrong contents.
    """
    from equivcheck.programs.nouns import case_from_json

    if file == "-":
        return case_from_json(read_stream(standard_input(), "standard input"), where="standard input")
    if os.path.isdir(file):
        raise UsageError(f"file {file} is not valid: it is a folder. Expected a JSON file (`replay` accepts folders)")
    return case_from_json(read_text(file), where=file)


def read_scenario(file: str) -> Scenario:
    """Read a scenario from a JSON file, or from standard input for ``-``.

    Raises `UsageError` if it is a tensor program or there is no such file, and `InvalidScenario` for wrong contents.
    """
    from equivcheck.scenario import Scenario

    case = read_case(file)
    if not isinstance(case, Scenario):
        raise UsageError(f"file {file} is not valid: it contains a tensor program. Expected a file with a scenario")
    return case
