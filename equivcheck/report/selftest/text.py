"""A selftest, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.quality.selftest.row import Row, Selftest, Shrunk
from equivcheck.scenario.scenario import count, in_words


def print_selftest(console: Console, found: Selftest) -> None:
    """A line for each mutant, what survived or was not reached, and the rates."""
    for part in _parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))


def in_a_line(row: Row) -> str:
    """``lost_bucket: caught in 5 of 6, first after 3 examples, 0.4 s; shrunk to 2 ranks, 1 layer (1-1), 1 step``."""
    if row.broken:
        return f"{row.name}: not completed: {row.broken}"
    if not row.reachable:
        return f"{row.name}: no effect in {count(row.drawn, 'example')}"
    if row.shrunk is None:
        return f"{row.name}: not caught in any of {count(row.reachable, 'scenario')} that it affects"
    first = f"first after {count(row.examples, 'example')}, {row.seconds:.1f} s"
    return f"{row.name}: caught in {row.caught} of {row.reachable}, {first}; shrunk to {_size(row.shrunk)}"


def _parts(found: Selftest) -> Iterator[RenderableType]:
    yield _table(found.rows)
    for row in found.rows:
        yield from _remarks(row)
    yield from _totals(found)


def _table(rows: tuple[Row, ...]) -> Table:
    table = Table("mutant", box=None, pad_edge=False, header_style="bold")
    for heading in ("reached", "caught", "undecided", "examples", "seconds"):
        table.add_column(heading, justify="right")
    for heading in ("shrunk to", "options", "diagnosis"):
        table.add_column(heading)
    for row in rows:
        left = (Text("-"), "-") if row.shrunk is None else (_left(row.shrunk), "; ".join(row.shrunk.options) or "none")
        numbers = (row.reachable, row.caught, row.undecided, row.examples or "-")
        style = "" if row.is_killed and not row.broken else "red"
        table.add_row(Text(row.name, style=style), *map(str, numbers), f"{row.seconds:.1f}", *left, _diagnosis(row))
    return table


def _left(shrunk: Shrunk) -> Text:
    return Text(_size(shrunk), style="" if shrunk.is_small else "yellow")


def _size(shrunk: Shrunk) -> str:
    widths = "-".join(map(str, shrunk.widths))
    return f"{count(shrunk.ranks, 'rank')}, {count(shrunk.layers, 'layer')} ({widths}), {count(shrunk.steps, 'step')}"


def _diagnosis(row: Row) -> Text:
    if row.is_explained and row.given is not None:
        return Text(row.given.cause.value, style="green")
    given = "none" if row.given is None else row.given.cause.value
    return Text(f"{given}, not {row.expected[0].value}", style="yellow" if row.is_killed else "dim")


def _remarks(row: Row) -> Iterator[Text]:
    """What is wrong with the checker, for each mutant of which anything is."""
    if row.broken:
        yield Text(f"{row.name} was not completed: {row.broken}", style="red")
    elif not row.reachable:
        yield Text(f"{row.name} had no effect in {count(row.drawn, 'example')}: the generator does not cover it", style="red")
    if row.survivor is not None:
        missed = "was caught, but not in" if row.is_killed else "was not caught in"
        yield Text(f"{row.name} {missed}: {in_words(row.survivor)}", style="yellow" if row.is_killed else "red")
    if row.shrunk is not None and not row.shrunk.is_small:
        least = row.shrunk.minimum
        known = f"{count(least.ranks, 'rank')}, {count(least.layers, 'layer')}, {count(least.steps, 'step')} ({least.because})"
        yield Text(f"{row.name} did not shrink to the known minimum of {known}", style="yellow")


def _totals(found: Selftest) -> Iterator[Text]:
    early = " (stopped before the end)" if found.interrupted else ""
    yield Text(f"\n{count(len(found.rows), 'mutant')} in {found.seconds:.0f} s{early}, seed {found.seed}")
    yield Text(
        f"reached {found.num_reached} ({found.reached_rate:.0%}), killed {found.num_killed} ({found.kill_rate:.0%} of reached), "
        f"caught in {found.caught_rate:.1%} of the scenarios that they affect",
        style="bold green" if found.is_passed else "bold red",
    )
    yield Text(f"examples to the first catch: median {found.median_examples:g}, at most {found.worst_examples}")
    yield Text(
        f"right diagnosis for {found.diagnosis_rate:.0%} of those killed; {found.num_small} shrunk to at most one rank, "
        "one layer and one step more than the known minimum"
    )
