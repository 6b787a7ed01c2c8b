"""Formats matrix rows: as a table, as numbers, and as one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.printable import escape_unprintable
from equivcheck.user.matrix.row import LayoutRow

NOTHING = "-"
"""Placeholder for an unknown number."""


def row_line(row: LayoutRow) -> str:
    """Return a line about a row: ``tp: diverged, step 0 gradient layers.0.weight, 85 ms``."""
    return escape_unprintable(
        ", ".join(filter(None, (f"{row.name}: {outcome_text(row)}", row.first_difference, f"{row.milliseconds:.0f} ms")))
    )


def outcome_text(row: LayoutRow) -> str:
    """Return a row's outcome. If the layout was not expected to be EQUIVALENT, a remark says so."""
    if row.expected is Outcome.EQUIVALENT:
        return row.outcome
    return f"{row.outcome}, {'as expected' if row.is_as_expected else f'expected {row.expected.value}'}"


def numbers(row: LayoutRow) -> dict[str, str]:
    """Return a row's numbers by column: gradient norm ratio, first loss, collective calls and bytes in a step, and CPU time."""
    found = row.measures
    if found is None:
        measured = (NOTHING,) * 4
    else:
        measured = digits(found.norm_ratio), digits(found.loss), _whole(found.num_calls), _whole(found.num_bytes)
    return dict(zip(HEADINGS, (*measured, f"{row.milliseconds:.0f}"), strict=True))


HEADINGS = ("norm ratio", "first loss", "calls", "bytes", "ms")
"""Headings for `numbers`."""


def table(rows: Sequence[LayoutRow], width: int) -> Table:
    """Build a table for a screen with this width. It always has each layout and outcome, and as many other columns as fit."""
    columns = {"layout": [row.name for row in rows], "mesh": [row.axes for row in rows], "outcome": list(map(outcome_text, rows))}
    columns |= {heading: [numbers(row)[heading] for row in rows] for heading in HEADINGS}
    widths = _fitting({heading: max(map(cell_len, (heading, *texts))) for heading, texts in columns.items()}, width)
    made = Table(box=None, pad_edge=False, header_style="bold", width=sum(widths.values()) + _GAP * (len(widths) - 1))
    for heading in widths:
        made.add_column(heading, justify="right" if heading in HEADINGS else "left", no_wrap=True)
    for index, row in enumerate(rows):
        texts = {heading: Text(columns[heading][index]) for heading in widths}
        texts["outcome"].stylize(_style(row))
        made.add_row(*texts.values())
    return made


_GAP = 2
"""Blanks between two columns."""


def _fitting(widths: Mapping[str, int], width: int) -> dict[str, int]:
    """Widths for all fitting columns, in order. Layout and outcome are always among them."""
    shown, left = {"layout", "outcome"}, width + _GAP
    for heading in ("layout", "outcome", "norm ratio", "first loss", "mesh", "calls", "bytes", "ms"):
        if heading in shown or widths[heading] + _GAP <= left:
            shown, left = {*shown, heading}, left - widths[heading] - _GAP
    return {heading: each for heading, each in widths.items() if heading in shown}


def _style(row: LayoutRow) -> str:
    if not row.is_as_expected:
        return "red"
    return "green" if row.expected is Outcome.EQUIVALENT else "dim"


def difference_line(row: LayoutRow) -> str:
    """Return a line with a row's layout, first difference and cause: ``ddp: step 0 gradient 0.weight; no gradient is reduced``.

    Empty if there is no difference.
    """
    found = "; ".join(filter(None, (row.first_difference, row.cause)))
    return found and f"{row.name}: {found}"


def digits(value: float | None) -> str:
    """Format a number with six significant digits."""
    return NOTHING if value is None else f"{value:.6g}"


def _whole(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"
