"""`equivcheck export`: write a script that needs only torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.cli.cases.check import read_case
from equivcheck.cli.findings.replay import find
from equivcheck.cli.findings.script import DEFAULT_NAME, NumberSource, run_with_torchrun, script_text
from equivcheck.cli.options import choice_option, json_option, print_json, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import UsageError

if TYPE_CHECKING:
    from equivcheck.oracle.verdict.verdict import CaseVerdict
    from equivcheck.system.commands import FinishedCommand

DEADLINE = 60.0
"""Deadline for a check if the argument is a case and not a finding, in seconds."""


@click.command()
@click.argument("finding")
@store_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; - for stdout.  [default: stdout]")
@click.option("--name", metavar="NAME", help="File name that the script mentions.  [default: the output file]")
@choice_option(
    "--numbers",
    NumberSource.AUTO,
    "exact: literal numbers of the scenario; drawn: random ones; auto: exact if few, or if random ones do not reproduce it.",
)
@click.option("--run", is_flag=True, help="Run the script with torchrun and print its output.")
@json_option
def export(  # noqa: PLR0913, PLR0917 - an argument for each option
    finding: str,
    store: Path,
    output: Path | None,
    name: str | None,
    numbers: str,
    run: bool,
    as_json: bool,
) -> ExitCode:
    """Write a script that reproduces a finding with torch only.

    FINDING is a folder, the first digits of a fingerprint, or a JSON file with a case. The script runs the case on one device and
    in parallel, prints the differences, and exits with 1 if there is any.
    """
    verdict, seen_on = _verdict(finding, store)
    name = name or (DEFAULT_NAME if output is None or str(output) == "-" else output.name)
    text = script_text(verdict, NumberSource(numbers), name=name, seen_on=seen_on)
    ran = run_with_torchrun(text, verdict, name) if run else None
    _write(text, output, quiet=as_json or run)
    if as_json:
        print_json(_object(verdict, text, ran))
    elif ran is not None:
        click.echo(ran.printed, nl=False)
        if "max difference" not in ran.printed:
            click.echo(ran.errors, nl=False, err=True)
        click.echo(f"exit code {ran.code}")
    return ExitCode.FINDINGS if ran is not None and ran.code else ExitCode.NOTHING_FOUND


def _verdict(finding: str, store: Path) -> tuple[CaseVerdict, str]:
    """Return the verdict on a finding or on the case in a file, and the finding's torch version (empty for the installed one)."""
    if not (os.path.isfile(finding) or finding == "-"):
        kept = find(finding, store)
        return kept.verdict, kept.environment.torch
    from equivcheck.campaign.workers.process import check_isolated

    return check_isolated(read_case(finding), world="sim", deadline=DEADLINE), ""


def _write(text: str, output: Path | None, *, quiet: bool) -> None:
    if output is None or str(output) == "-":
        if not quiet:
            click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"file {output} cannot be written: {error.strerror}") from error


def _object(verdict: CaseVerdict, text: str, ran: FinishedCommand | None) -> dict[str, Any]:
    return {
        "layout": verdict.case.name,
        "ranks": verdict.case.num_ranks,
        "outcome": verdict.outcome.value,
        "script": text,
        "lines": text.count("\n"),
        "exit_code": None if ran is None else ran.code,
        "printed": None if ran is None else ran.printed,
    }
