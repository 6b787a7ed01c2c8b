"""Rows of a matrix for people: in words, in a table, and in a line each."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from equivcheck.layout_matrix.row import MatrixResult, Row
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import printable
from equivcheck.verdict.verdict import Outcome

NOTHING = "-"
"""Stands for a number that is not known."""
_WIDTH = 160


def print_matrix(console: Console, found: MatrixResult) -> None:
    """A table, all that is known of each layout that is not as it should be, and how many are."""
    for part in _parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))


def matrix_text(found: MatrixResult) -> str:
    """The same as plain text."""
    text = io.StringIO()
    print_matrix(Console(file=text, highlight=False, markup=False, width=_WIDTH), found)
    return text.getvalue().rstrip()


def in_a_line(row: Row) -> str:
    """``tp: diverged, step 0 gradient layers.0.weight, 85 ms``."""
    return printable(", ".join(filter(None, (f"{row.name}: {said(row)}", row.first_difference, f"{row.milliseconds:.0f} ms"))))


def said(row: Row) -> str:
    """The outcome, and whether it is as expected where that is anything but EQUIVALENT."""
    if row.expected is Outcome.EQUIVALENT:
        return row.outcome
    return f"{row.outcome}, {'as expected' if row.is_as_expected else f'expected {row.expected.value}'}"


def cells(row: Row) -> tuple[str, ...]:
    """Gradient norm over that of one device, loss of the first step, calls and bytes of a step, CPU time."""
    found = row.measures
    if found is None:
        numbers = (NOTHING,) * 4
    else:
        numbers = _digits(found.norm_ratio), _digits(found.loss), _whole(found.num_calls), _whole(found.num_bytes)
    return (*numbers, f"{row.milliseconds:.0f}")


HEADINGS = ("norm ratio", "first loss", "calls", "bytes", "ms")
"""What the cells are."""


def totals(found: MatrixResult) -> str:
    """``7 layouts: 6 equivalent, 1 diverged as expected``."""
    counted = dict.fromkeys((said(row) for row in found.rows), 0)
    for row in found.rows:
        counted[said(row)] += 1
    parts = [f"{number} {what}" for what, number in counted.items()]
    left = found.asked - len(found.rows)
    parts += [f"{left} not reached, as it was interrupted"] if left else []
    return f"{count(found.asked, 'layout')}: {'; '.join(parts) or 'none checked'}"


def one_device(found: MatrixResult) -> str:
    """``one device: first loss 0.88, gradient norm 0.69``; empty where no ranks finished."""
    measures = next((row.measures for row in found.rows if row.measures is not None), None)
    if measures is None:
        return ""
    return f"one device: first loss {_digits(measures.expected_loss)}, gradient norm {_digits(measures.expected_gradient_norm)}"


def _parts(found: MatrixResult) -> Iterator[RenderableType]:
    yield _table(found)
    yield Text(one_device(found), style="dim")
    for row in found.unexpected:
        yield Text(f"\n{row.name}", style="bold")
        yield Text("\n".join(f"  {line}" for line in printable(row.details).splitlines()))
    yield Text(f"\n{totals(found)}", style="bold green" if found.is_passed else "bold red")


def _table(found: MatrixResult) -> Table:
    table = Table("layout", box=None, pad_edge=False, header_style="bold")
    for heading in ("mesh", "outcome"):
        table.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first difference, and why", overflow="fold")
    for row in found.rows:
        table.add_row(row.name, row.axes, Text(said(row), style=_style(row)), *cells(row), _difference(row))
    return table


def _style(row: Row) -> str:
    if not row.is_as_expected:
        return "red"
    return "green" if row.expected is Outcome.EQUIVALENT else "dim"


def _difference(row: Row) -> Text:
    return Text(printable("; ".join(filter(None, (row.first_difference, row.cause)))))


def _digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.6g}"


def _whole(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"
