"""A race, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.quality.selftest.race.result import CampaignRun, Race
from equivcheck.scenario.scenario import count


def print_race(console: Console, found: Race) -> None:
    """A line for each mutant, the last to be caught first, and the figures of all."""
    for part in _parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))


def run_in_a_line(run: CampaignRun) -> str:
    """``seed 3: 140 of 150 mutants caught ...``."""
    if run.broken:
        return f"seed {run.seed}: not completed: {run.broken}"
    return f"seed {run.seed}: {count(len(run.catches), 'mutant')} caught in {count(run.checks, 'check')}, {run.seconds:.0f} CPU s"


def _parts(found: Race) -> Iterator[RenderableType]:
    yield _table(found)
    for run in found.campaigns:
        yield Text(run_in_a_line(run), style="red" if run.broken else "")
    early = " (stopped before the end)" if found.interrupted else ""
    yield Text(
        f"CPU seconds to the first catch, of {count(len(found.distance.mutants), 'mutant')}{early}: median {found.median:.1f}, "
        f"nine of ten within {found.most_of_nine_in_ten:.1f}, all together {found.total:.0f}",
        style="bold green" if found.is_passed else "bold red",
    )
    if found.never_caught:
        yield Text(f"never caught within {found.distance.seconds:g} CPU s: {', '.join(found.never_caught)}", style="red")


def _table(found: Race) -> Table:
    table = Table("mutant", box=None, pad_edge=False, header_style="bold")
    for heading in ("campaigns", "CPU seconds", "checks"):
        table.add_column(heading, justify="right")
    for name in sorted(found.distance.mutants, key=found.seconds, reverse=True):
        catches = found.catches(name)
        is_always = len(catches) == len(found.campaigns)
        checks = ", ".join(str(catch.checks) for catch in catches) or "-"
        seconds = f"{'' if is_always else 'at least '}{found.seconds(name):.1f}"
        table.add_row(name, f"{len(catches)}/{len(found.campaigns)}", seconds, checks, style="" if catches else "red")
    return table
