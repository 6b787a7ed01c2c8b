"""Formats a selftest's result, as text and as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equivcheck.quality.selftest.result import MutantResult, SelftestResult, ShrunkScenario
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.scenario.scenario import count, describe_case


def print_selftest(console: Console, found: SelftestResult) -> None:
    """Print a line for each mutant, then the missed mutants, the mutants without effect, and the rates."""
    console.print(_table(found.rows))
    for line in (*(line for row in found.rows for line in _remarks(row)), *_totals(found)):
        console.print(line, soft_wrap=True)


def mutant_line(row: MutantResult) -> str:
    """Describe the result for one mutant in a line, with the shrunk model's widths in parentheses.

    Example: ``lost_bucket: caught in 5 of 6, first after 3 examples, 0.4 s; shrunk to 2 ranks, 1 layer (1-1)``.
    """
    if row.broken:
        return f"{row.name}: not completed: {row.broken}"
    if not row.reachable:
        return f"{row.name}: no effect in {count(row.drawn, 'example')}"
    if row.shrunk is None:
        return f"{row.name}: not caught in any of {count(row.reachable, 'scenario')} that it affects"
    first = f"first after {count(row.examples, 'example')}, {row.seconds:.1f} s"
    return f"{row.name}: caught in {row.caught} of {row.reachable}, {first}; shrunk to {_size(row.shrunk)}"


def _table(rows: tuple[MutantResult, ...]) -> Table:
    table = Table("mutant", box=None, pad_edge=False, header_style="bold")
    for heading in ("reached", "caught", "undecided", "examples", "seconds"):
        table.add_column(heading, justify="right")
    for heading in ("shrunk to", "options", "diagnosis"):
        table.add_column(heading)
    for row in rows:
        left: tuple[Text | str, str] = "-", "-"
        if row.shrunk is not None:
            size = Text(_size(row.shrunk), style="" if row.shrunk.is_small else "yellow")
            left = size, "; ".join(row.shrunk.options) or "none"
        numbers = (row.reachable, row.caught, row.undecided, row.examples or "-")
        style = "" if row.is_killed and not row.broken else "red"
        table.add_row(Text(row.name, style=style), *map(str, numbers), f"{row.seconds:.1f}", *left, _diagnosis(row))
    return table


def _size(shrunk: ShrunkScenario) -> str:
    widths = "-".join(map(str, shrunk.widths))
    return f"{count(shrunk.ranks, 'rank')}, {count(shrunk.layers, 'layer')} ({widths}), {count(shrunk.steps, 'step')}"


def _diagnosis(row: MutantResult) -> Text:
    if row.is_explained and row.given is not None:
        return Text(row.given.cause.value, style="green")
    given = "none" if row.given is None else row.given.cause.value
    return Text(f"{given}, not {row.expected[0].value}", style="yellow" if row.is_killed else "dim")


def _remarks(row: MutantResult) -> Iterator[Text]:
    """Yield the checker's failures for one mutant."""
    if row.broken:
        yield Text(f"{row.name} was not completed: {row.broken}", style="red")
    elif not row.reachable:
        yield Text(f"{row.name} had no effect in {count(row.drawn, 'example')}: the generator does not cover it", style="red")
    if row.survivor is not None:
        missed = "was caught, but not in" if row.is_killed else "was not caught in"
        yield Text(f"{row.name} {missed}: {describe_case(row.survivor)}", style="yellow" if row.is_killed else "red")
    if row.shrunk is not None and not row.shrunk.is_small:
        least = row.shrunk.minimum
        known = f"{count(least.ranks, 'rank')}, {count(least.layers, 'layer')}, {count(least.steps, 'step')} ({least.because})"
        yield Text(f"{row.name} did not shrink to the known minimum of {known}", style="yellow")


def _totals(found: SelftestResult) -> Iterator[Text]:
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


def selftest_object(found: SelftestResult) -> dict[str, Any]:
    """Convert a selftest's result to a JSON object. Rates are fractions from 0 to 1."""
    return {
        "mutants": [_row_object(row) for row in found.rows],
        "kill_rate": round(found.kill_rate, 4),
        "reached_rate": round(found.reached_rate, 4),
        "diagnosis_rate": round(found.diagnosis_rate, 4),
        "caught_rate": round(found.caught_rate, 4),
        "median_examples": found.median_examples,
        "worst_examples": found.worst_examples,
        "small": found.num_small,
        "asked": found.asked,
        "examined": len(found.rows),
        "reached": found.num_reached,
        "killed": found.num_killed,
        "seed": found.seed,
        "seconds": round(found.seconds, 3),
        "interrupted": found.interrupted,
    }


def _row_object(row: MutantResult) -> dict[str, Any]:
    return {
        "name": row.name,
        "family": row.family.value,
        "drawn": row.drawn,
        "reachable": row.reachable,
        "caught": row.caught,
        "undecided": row.undecided,
        "survived": row.num_missed,
        "layouts": {
            each.name: {"reachable": each.reachable, "caught": each.caught, "undecided": each.undecided} for each in row.layouts
        },
        "examples": row.examples or None,
        "seconds": round(row.seconds, 3),
        "survivor": None if row.survivor is None else json.loads(to_json(row.survivor)),
        "shrunk": None if row.shrunk is None else _shrunk_object(row.shrunk),
        "diagnosis_expected": row.expected[0].value,
        "diagnosis_accepted": [cause.value for cause in row.expected],
        "diagnosis_given": None if row.given is None else row.given.cause.value,
        "diagnosis_sentence": None if row.given is None else row.given.sentence,
        "diagnosis_right": row.is_explained,
        "broken": row.broken or None,
    }


def _shrunk_object(shrunk: ShrunkScenario) -> dict[str, Any]:
    least = shrunk.minimum
    return {
        "ranks": shrunk.ranks,
        "layers": shrunk.layers,
        "widths": list(shrunk.widths),
        "steps": shrunk.steps,
        "options": list(shrunk.options),
        "outcome": shrunk.outcome.value,
        "repr": repr(shrunk.scenario),
        "scenario": json.loads(to_json(shrunk.scenario)),
        "minimum": {"ranks": least.ranks, "layers": least.layers, "steps": least.steps, "because": least.because},
        "small": shrunk.is_small,
        "seconds": round(shrunk.seconds, 3),
        "checks": shrunk.checks,
    }
