"""`equivcheck check`: one scenario from a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from equivcheck.cli.options import confirm_option, console, deadline_option, json_option, print_json, world_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import UsageError
from equivcheck.system.input_file import read_stream, read_text
from equivcheck.system.streams import standard_input

if TYPE_CHECKING:
    from equivcheck.scenario import Scenario


@click.command()
@click.argument("file", type=click.Path(path_type=str))
@world_option("sim")
@deadline_option(60.0)
@click.option("--comm", is_flag=True, help="Also show what the ranks communicate, beside what is expected.")
@click.option("--beyond", is_flag=True, help="Run it beyond limits of torch too: it must be right, or raise on every rank.")
@confirm_option
@json_option
def check(  # noqa: PLR0913, PLR0917 - options
    file: str, world: str, deadline: float, comm: bool, beyond: bool, confirm: bool, as_json: bool
) -> ExitCode:
    """Check the scenario in FILE (JSON; - for standard input)."""
    scenario = read_scenario(file)
    from equivcheck.diagnosis.explain import explained
    from equivcheck.findings.finding import communication_object, verdict_object
    from equivcheck.oracle.beyond import check_beyond
    from equivcheck.oracle.check import check as check_within
    from equivcheck.oracle.confirm import CONFIRMING, confirmed_by, may_be_confirmed
    from equivcheck.report.communication_text import print_communication
    from equivcheck.report.verdict_text import print_verdict

    check_scenario = check_beyond if beyond else check_within
    verdict = check_scenario(scenario, world=world, deadline=deadline)
    if not verdict.beyond:
        verdict = explained(verdict, deadline=deadline)
    if confirm and may_be_confirmed(verdict):
        verdict = confirmed_by(verdict, lambda: check_scenario(scenario, world=CONFIRMING, deadline=deadline))
    if as_json:
        print_json(verdict_object(verdict) | ({"communication": communication_object(verdict)} if comm else {}))
    else:
        print_verdict(console(), verdict)
        if comm:
            print_communication(console(), verdict)
    return ExitCode.FINDINGS if verdict.outcome.is_finding else ExitCode.NOTHING_FOUND


def read_scenario(file: str) -> Scenario:
    """The scenario in a file, or on standard input for ``-``. Raises `UsageError` or `InvalidScenario`."""
    from equivcheck.scenario.file_format.codec import from_json

    if file == "-":
        return from_json(read_stream(standard_input(), "standard input"), where="standard input")
    if os.path.isdir(file):
        raise UsageError(f"file {file} is a folder; allowed: a file with a scenario (replay takes the folder of a finding)")
    return from_json(read_text(file), where=file)
