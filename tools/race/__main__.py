"""Measures how much CPU time campaigns take to catch each mutant: `python -m tools.race --seconds 300`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.cli.checker.selftest import mutants_option
from equivcheck.cli.options import console, json_option, print_json
from equivcheck.cli.searches.fuzz import num_cores
from equivcheck.mutants.mutant import Mutant
from equivcheck.scenario.scenario import count
from tools.race.campaign import race
from tools.race.result import CampaignRun, Distance, Race


@click.command()
@mutants_option
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True, help="CPU time of each campaign."
)
@click.option("--campaigns", type=click.IntRange(min=1), default=2, show_default=True, help="Number of campaigns.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the first campaign.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: one per core]")
@json_option
def main(  # noqa: PLR0913, PLR0917 - options
    mutants: tuple[Mutant, ...], seconds: float, campaigns: int, seed: int, workers: int | None, as_json: bool
) -> None:
    """Run campaigns until each mutant is caught. Exit code 1 if no campaign catches one of them."""
    found = race(
        Distance(seconds=seconds, mutants=tuple(mutant.name for mutant in mutants)),
        seed=seed,
        num_campaigns=campaigns,
        num_workers=workers or num_cores(),
        listener=lambda run, number: click.echo(f"{number}/{campaigns} {_line(run)}", err=True),
    )
    if as_json:
        print_json(race_object(found))
    else:
        for part in _parts(found):
            console().print(part, soft_wrap=isinstance(part, Text))
    sys.exit(0 if found.is_passed else 1)


def race_object(found: Race) -> dict[str, Any]:
    """Figures as one JSON object; seconds are CPU time."""
    return {
        "mutants": [
            {
                "name": name,
                "caught": len(found.catches(name)),
                "mean_seconds": round(found.seconds(name), 3),
                "seconds": [round(catch.seconds, 3) for catch in found.catches(name)],
                "checks": [catch.checks for catch in found.catches(name)],
            }
            for name in found.distance.mutants
        ],
        "median_seconds": round(found.median, 3),
        "p90_seconds": round(found.p90, 3),
        "total_seconds": round(found.total, 3),
        "never_caught": list(found.never_caught),
        "campaigns": [
            {
                "seed": each.seed,
                "seconds": round(each.seconds, 3),
                "checks": each.checks,
                "caught": len(each.catches),
                "broken": each.broken or None,
            }
            for each in found.campaigns
        ],
        "budget_seconds": found.distance.seconds,
        "interrupted": found.interrupted,
    }


def _line(run: CampaignRun) -> str:
    if run.broken:
        return f"seed {run.seed}: not completed: {run.broken}"
    return f"seed {run.seed}: {count(len(run.catches), 'mutant')} caught in {count(run.checks, 'check')}, {run.seconds:.0f} CPU s"


def _parts(found: Race) -> Iterator[RenderableType]:
    table = Table("mutant", box=None, pad_edge=False, header_style="bold")
    for heading in ("campaigns", "CPU seconds", "checks"):
        table.add_column(heading, justify="right")
    for name in sorted(found.distance.mutants, key=found.seconds, reverse=True):
        catches = found.catches(name)
        checks = ", ".join(str(catch.checks) for catch in catches) or "-"
        seconds = f"{'' if len(catches) == len(found.campaigns) else 'at least '}{found.seconds(name):.1f}"
        table.add_row(name, f"{len(catches)}/{len(found.campaigns)}", seconds, checks, style="" if catches else "red")
    yield table
    for run in found.campaigns:
        yield Text(_line(run), style="red" if run.broken else "")
    early = " (stopped before the end)" if found.interrupted else ""
    yield Text(
        f"CPU seconds to the first catch of {count(len(found.distance.mutants), 'mutant')}{early}: median {found.median:.1f}, "
        f"90 % within {found.p90:.1f}, total {found.total:.0f}",
        style="bold green" if found.is_passed else "bold red",
    )
    if found.never_caught:
        yield Text(f"never caught within {found.distance.seconds:g} CPU s: {', '.join(found.never_caught)}", style="red")


if __name__ == "__main__":
    main()
