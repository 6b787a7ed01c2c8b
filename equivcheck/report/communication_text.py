"""Prints the collective calls in a check: a table, and a lane for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from equivcheck.layouts.base.expected_calls.communication import Key, Totals, describe_calls, order_of, totals
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.report.lanes import PlacedCall, group_names, placed_steps, steps_in_words, used_letters
from equivcheck.worlds.call import BEFORE_STEPS
from equivcheck.worlds.trace.stage import Stage

_MAX_COLUMNS = 60
"""Maximum number of calls per step in a lane."""
_STEPLESS = (Stage.SETUP, Stage.READING)
"""Stages outside the training, for which no calls are predicted."""


def print_communication(console: Console, verdict: Verdict) -> None:
    """Print actual and expected collective calls and bytes for each step, then a line with each rank's calls in order.

    Ranks with the same numbers share a table.
    """
    if not verdict.calls:
        console.print(Text(f"no calls to show: {verdict.unmodelled or 'the ranks did not finish'}"), soft_wrap=True)
        return
    if verdict.unmodelled:
        console.print(Text(f"calls are not compared, because none are predicted: {verdict.unmodelled}"), soft_wrap=True)
    for rows, members in _alike(verdict).items():
        console.print(Text(f"\n{_ranks(members)}:", style="bold"))
        console.print(_table(rows, modelled=not verdict.unmodelled))
    _print_lanes(console, verdict)


Rows = tuple[tuple[Key, tuple[int, int], tuple[int, int]], ...]
"""For each kind of call: actual number and bytes, and expected number and bytes."""


def _alike(verdict: Verdict) -> dict[Rows, list[int]]:
    """Group ranks whose rows are equal."""
    scenario, found = verdict.scenario, dict[Rows, list[int]]()
    for rank, calls in enumerate(verdict.calls):
        actual = totals(calls, scenario.layout.mesh)
        expected = {} if verdict.unmodelled else predict_calls(scenario.training, scenario.layout, rank).with_bytes_from(actual)
        found.setdefault(_rows(actual, expected), []).append(rank)
    return found


def _rows(actual: Totals, expected: Totals) -> Rows:
    keys = sorted(actual.keys() | expected.keys(), key=order_of)
    return tuple((key, actual.get(key, (0, 0)), expected.get(key, (0, 0))) for key in keys)


def _table(rows: Rows, *, modelled: bool) -> Table:
    table = Table("step", "stage", "call", "over", box=None, pad_edge=False, header_style="bold")
    for heading in ("calls", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("expected")
    for (step, stage, op, axes), (num_calls, num_bytes), expected in rows:
        comparison = (
            _comparison((num_calls, num_bytes), expected) if modelled and stage not in _STEPLESS else Text("-", style="dim")
        )
        where = "" if step == BEFORE_STEPS else str(step)
        table.add_row(where, stage.value, op, axes or "one rank", f"{num_calls:,}", f"{num_bytes:,}", comparison)
    return table


def _comparison(actual: tuple[int, int], expected: tuple[int, int]) -> Text:
    return Text("the same", style="green") if actual == expected else Text(describe_calls(*expected), style="red")


def _print_lanes(console: Console, verdict: Verdict) -> None:
    mesh = verdict.scenario.layout.mesh
    for steps, placed in placed_steps(verdict.calls, mesh):
        console.print(Text(f"\n{steps_in_words(steps)}", style="bold"))
        for rank, cells in enumerate(lane_cells(placed, mesh.num_ranks)):
            left_out = len(cells) - _MAX_COLUMNS
            more = f" and {left_out:,} more" if left_out > 0 else ""
            line = f"  rank {rank:>{len(str(mesh.num_ranks - 1))}}  {' '.join(cells[:_MAX_COLUMNS])}{more}"
            console.print(Text(line, no_wrap=True), soft_wrap=True)
    groups = ", ".join(
        f"{_group_letter(number)} {name or 'one rank'}" for number, name in enumerate(group_names(verdict.calls, mesh))
    )
    used = ", ".join(f"{letter} {op}" for letter, op in used_letters(verdict.calls))
    console.print(Text(f"\n{used}; {groups}", style="dim"), soft_wrap=True)


def lane_cells(placed: Sequence[PlacedCall], num_ranks: int) -> list[list[str]]:
    """Return a row for each rank, with a cell of two characters for each column.

    The first character stands for the kind of call, the second for its group. A dot means that the rank makes no call.
    """
    rows = [[" ."] * (1 + max(one.column for one in placed)) for _ in range(num_ranks)]
    for one in placed:
        rows[one.rank][one.column] = one.letter + _group_letter(one.group)
    return rows


def _group_letter(number: int) -> str:
    return chr(ord("a") + number % 26)


def _ranks(found: list[int]) -> str:
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"
