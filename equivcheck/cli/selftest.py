"""`equivcheck selftest`: how good the checker is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.fuzz import num_cores
from equivcheck.cli.options import console, html_option, json_option, print_json, write_page
from equivcheck.cli.shell import ExitCode

if TYPE_CHECKING:
    from equivcheck.mutants.mutant import Mutant
    from equivcheck.quality.selftest.row import Row, Selftest


@click.command()
@click.option("--mutants", metavar="NAME,...", help="Only these, in this order; may be repeated.  [default: all]", multiple=True)
@click.option(
    "--examples", type=click.IntRange(1, 500), default=200, show_default=True, help="Most scenarios generated for a mutant."
)
@click.option(
    "--seconds-per-mutant",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Time limit for checking them; shrinking takes up to 20 more.",
)
@click.option(
    "--race",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Measure instead how much CPU time campaigns take to catch each mutant, of at most so many CPU seconds each.",
)
@click.option("--campaigns", type=click.IntRange(min=1), default=2, show_default=True, help="Campaigns of --race.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the generated scenarios.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
@json_option
@html_option
def selftest(  # noqa: PLR0913, PLR0917 - options
    mutants: tuple[str, ...],
    examples: int,
    seconds: float,
    race: float | None,
    campaigns: int,
    seed: int,
    workers: int | None,
    as_json: bool,
    html: Path | None,
) -> ExitCode:
    """Plant known bugs (mutants) into parallel trainings, one at a time, and measure how many of them the checker catches.

    The scenario of a catch is shrunk and diagnosed. Exit code 1 if a mutant has no effect in any generated scenario, or is never
    caught. Ctrl-C ends it early, with the results so far.
    """
    if race is not None:
        if html is not None:
            raise click.UsageError("--html is a page of the selftest; allowed with --race: --json")
        return _race(_chosen(mutants), race, seed, campaigns, workers or num_cores(), as_json=as_json)
    from equivcheck.quality.selftest.examine import Effort
    from equivcheck.quality.selftest.supervisor import selftest as examine_all
    from equivcheck.report.selftest.object import selftest_object
    from equivcheck.report.selftest.text import print_selftest

    chosen = _chosen(mutants)
    found = examine_all(
        chosen,
        Effort(seed=seed, examples=examples, seconds=seconds),
        num_workers=workers or num_cores(),
        listener=lambda row, count: _tell(row, count, len(chosen)),
    )
    if as_json:
        print_json(selftest_object(found))
    else:
        print_selftest(console(), found)
    write_page(html, lambda file: _write_page(file, found, chosen))
    return _exit_code(found)


def _race(  # noqa: PLR0913 - options
    chosen: tuple[Mutant, ...], seconds: float, seed: int, campaigns: int, workers: int, *, as_json: bool
) -> ExitCode:
    from equivcheck.quality.selftest.race.result import Distance
    from equivcheck.quality.selftest.race.supervisor import race
    from equivcheck.report.selftest.race_object import race_object
    from equivcheck.report.selftest.race_text import print_race, run_in_a_line

    found = race(
        Distance(seconds=seconds, mutants=tuple(mutant.name for mutant in chosen)),
        seed=seed,
        num_campaigns=campaigns,
        num_workers=workers,
        listener=lambda run, count: click.echo(f"{count}/{campaigns} {run_in_a_line(run)}", err=True),
    )
    if as_json:
        print_json(race_object(found))
    else:
        print_race(console(), found)
    return ExitCode.NOTHING_FOUND if found.is_passed else ExitCode.FINDINGS


def _chosen(names: tuple[str, ...]) -> tuple[Mutant, ...]:
    from equivcheck.mutants.registry import mutant, mutants

    wanted = dict.fromkeys(name.strip() for part in names for name in part.split(","))
    return tuple(map(mutant, wanted)) if wanted else tuple(mutants().values())


def _write_page(file: Path, found: Selftest, chosen: tuple[Mutant, ...]) -> None:
    from equivcheck.report.pages import selftest

    selftest.write_page(file, found, chosen)


def _tell(row: Row, count: int, total: int) -> None:
    from equivcheck.report.selftest.text import in_a_line

    click.echo(f"{count}/{total} {in_a_line(row)}", err=True)


def _exit_code(found: Selftest) -> ExitCode:
    return ExitCode.NOTHING_FOUND if found.is_passed else ExitCode.FINDINGS
