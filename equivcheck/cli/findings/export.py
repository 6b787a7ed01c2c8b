"""`equivcheck export`: one script of torch alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivcheck.choice import Choice
from equivcheck.cli.check import read_scenario
from equivcheck.cli.findings.replay import find
from equivcheck.cli.options import json_option, print_json, store_option
from equivcheck.cli.shell import ExitCode
from equivcheck.errors import UsageError

if TYPE_CHECKING:
    from equivcheck.layouts.script.numbers import Numbers
    from equivcheck.mutants.mutant import Mutant
    from equivcheck.system.commands import Ran
    from equivcheck.verdict.verdict import Verdict

DEADLINE = 60.0
"""Seconds for the check of a scenario of which nothing is known yet."""
DEFAULT_NAME = "repro.py"


class NumberSource(Choice):
    """Where a script takes its numbers from."""

    AUTO = "auto"
    EXACT = "exact"
    DRAWN = "drawn"


@click.command()
@click.argument("finding")
@store_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; stdout if none is given, or for -.")
@click.option("--name", metavar="NAME", help="File name that the script mentions; by default that of the output file.")
@click.option("--mutant", "mutant_name", metavar="NAME", help="Plant the bug of this mutant into the parallel training.")
@click.option(
    "--numbers",
    type=click.Choice([wanted.value for wanted in NumberSource]),
    default=NumberSource.AUTO.value,
    show_default=True,
    help="exact: the scenario's own, as literals; drawn: random ones; auto: exact if few, or if random ones do not reproduce it.",
)
@click.option("--run", is_flag=True, help="Run the script by torchrun, and print its output.")
@json_option
def export(  # noqa: PLR0913, PLR0917 - an argument for each option
    finding: str,
    store: Path,
    output: Path | None,
    name: str | None,
    mutant_name: str | None,
    numbers: str,
    run: bool,
    as_json: bool,
) -> ExitCode:
    """Write a script that reproduces a FINDING with torch alone: its folder, its fingerprint's first digits, or a scenario file.

    The script runs the training on one device and in parallel, prints the difference of each tensor, and exits with 1 if there
    is any.
    """
    mutant = _mutant(mutant_name)
    verdict, seen_on = _verdict(finding, store, mutant)
    name = name or (DEFAULT_NAME if output is None or str(output) == "-" else output.name)
    text = script_text(verdict, mutant, NumberSource(numbers), name=name, seen_on=seen_on)
    launched = _launched(text, verdict, name) if run else None
    _write(text, output, quiet=as_json or run)
    if as_json:
        print_json(_object(verdict, text, launched))
    elif launched is not None:
        click.echo(launched.printed, nl=False)
        if "max difference" not in launched.printed:
            click.echo(launched.errors, nl=False, err=True)
        click.echo(f"exit code {launched.code}")
    return ExitCode.FINDINGS if launched is not None and launched.code else ExitCode.NOTHING_FOUND


def _mutant(name: str | None) -> Mutant | None:
    from equivcheck.mutants.registry import mutant

    return None if name is None else mutant(name)


def _verdict(finding: str, store: Path, mutant: Mutant | None) -> tuple[Verdict, str]:
    """What is wrong with what was asked for, and on which torch it was seen (empty for this one)."""
    if not (os.path.isfile(finding) or finding == "-"):
        if mutant is None:
            kept = find(finding, store)
            return kept.verdict, kept.environment.torch
        scenario = find(finding, store).verdict.scenario
    else:
        scenario = read_scenario(finding)
    from equivcheck.campaign.isolated import check_isolated
    from equivcheck.oracle.check import check

    if mutant is None:
        return check_isolated(scenario, world="sim", deadline=DEADLINE), ""
    if scenario.layout.name not in mutant.layouts or not mutant.applies(scenario):
        raise UsageError(f"mutant {mutant.name!r} does not apply to this scenario of {scenario.layout.name}: {mutant.wrong}")
    return check(scenario, deadline=DEADLINE, alter=mutant.plant), ""


def script_text(verdict: Verdict, mutant: Mutant | None, wanted: NumberSource, *, name: str, seen_on: str) -> str:
    """The script, run once where that decides which numbers it has; raises `UsageError` for what a script cannot express."""
    from equivcheck.export.script import script_of
    from equivcheck.layouts.script.numbers import Numbers, usual_numbers

    def written(numbers: Numbers) -> str:
        return script_of(verdict.scenario, verdict=verdict, mutant=mutant, numbers=numbers, name=name, seen_on=seen_on)

    if wanted is not NumberSource.AUTO:
        return written(Numbers(wanted.value))
    usual = usual_numbers(verdict.scenario.training)
    if usual is Numbers.EXACT or not _is_wrong(verdict):
        return written(usual)
    click.echo("running the script once, to see whether random numbers reproduce it too ...", err=True)
    drawn = written(Numbers.DRAWN)
    return drawn if _launched(drawn, verdict, name).code else written(Numbers.EXACT)


def _is_wrong(verdict: Verdict) -> bool:
    return verdict.divergence is not None or verdict.failure is not None


def _launched(text: str, verdict: Verdict, name: str) -> Ran:
    from equivcheck.export.launch import launch

    return launch(text, verdict.scenario.layout.mesh.num_ranks, name=name)


def _write(text: str, output: Path | None, *, quiet: bool) -> None:
    if output is None or str(output) == "-":
        if not quiet:
            click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"file {output} cannot be written: {error.strerror}") from error


def _object(verdict: Verdict, text: str, launched: Ran | None) -> dict[str, Any]:
    return {
        "layout": verdict.scenario.name,
        "ranks": verdict.scenario.layout.mesh.num_ranks,
        "outcome": verdict.outcome.value,
        "script": text,
        "lines": text.count("\n"),
        "exit_code": None if launched is None else launched.code,
        "printed": None if launched is None else launched.printed,
    }
