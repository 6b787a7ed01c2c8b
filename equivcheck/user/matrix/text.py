"""Matrix rows as text: a table, cells, and one line each."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.printable import escape_unprintable
from equivcheck.user.matrix.row import LayoutRow

NOTHING = "-"
"""Placeholder for an unknown number."""


def row_line(row: LayoutRow) -> str:
    """One line for a row: ``tp: diverged, step 0 gradient layers.0.weight, 85 ms``."""
    return escape_unprintable(
        ", ".join(filter(None, (f"{row.name}: {outcome_text(row)}", row.first_difference, f"{row.milliseconds:.0f} ms")))
    )


def outcome_text(row: LayoutRow) -> str:
    """Outcome, with a remark if the layout was not expected to be EQUIVALENT."""
    if row.expected is Outcome.EQUIVALENT:
        return row.outcome
    return f"{row.outcome}, {'as expected' if row.is_as_expected else f'expected {row.expected.value}'}"


def cells(row: LayoutRow) -> tuple[str, ...]:
    """Table cells for a row: norm ratio, first loss, calls and bytes per step, and CPU time."""
    found = row.measures
    if found is None:
        numbers = (NOTHING,) * 4
    else:
        numbers = digits(found.norm_ratio), digits(found.loss), _whole(found.num_calls), _whole(found.num_bytes)
    return (*numbers, f"{row.milliseconds:.0f}")


HEADINGS = ("norm ratio", "first loss", "calls", "bytes", "ms")
"""Column headings for `cells`."""


def table(rows: Iterable[LayoutRow]) -> Table:
    """Build a table with one line per row."""
    made = Table("layout", box=None, pad_edge=False, header_style="bold")
    for heading in ("mesh", "outcome"):
        made.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("first difference, and why", overflow="fold")
    for row in rows:
        made.add_row(row.name, row.axes, Text(outcome_text(row), style=_style(row)), *cells(row), _difference(row))
    return made


def _style(row: LayoutRow) -> str:
    if not row.is_as_expected:
        return "red"
    return "green" if row.expected is Outcome.EQUIVALENT else "dim"


def _difference(row: LayoutRow) -> Text:
    return Text(escape_unprintable("; ".join(filter(None, (row.first_difference, row.cause)))))


def digits(value: float | None) -> str:
    """Format a number with six significant digits."""
    return NOTHING if value is None else f"{value:.6g}"


def _whole(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"
