"""`MatrixResult`: rows for all layouts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.text import Text

from equivcheck.errors import NotEquivalent
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable, screen_width, wrap
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.matrix.text import difference_line, digits, outcome_text, table


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixResult:
    """Result of checking one training under many layouts: a row for each."""

    rows: tuple[LayoutRow, ...]
    """Rows of the checked layouts, in the matrix's order."""
    asked: int
    """How many layouts were to be checked."""
    interrupted: bool = False
    """Whether a signal ended the check early."""

    @property
    def is_passed(self) -> bool:
        """Whether all layouts were checked and have their expected outcome."""
        return 0 < len(self.rows) == self.asked and all(row.is_as_expected for row in self.rows)

    @property
    def unexpected(self) -> tuple[LayoutRow, ...]:
        """Rows whose outcome differs from the expected one."""
        return tuple(row for row in self.rows if not row.is_as_expected)

    def __getitem__(self, name: str) -> LayoutRow:
        """Return a layout's row. Raises `KeyError` for an unknown name."""
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise KeyError(f"layout {name!r} is not valid: the matrix has no layout of this name. Expected one of {names}.")

    def describe(self, *, verbose: bool = False) -> str:
        """Return a table as wide as the terminal, and below it a verdict for each layout with an unexpected outcome.

        If `verbose` is set, verdicts have the stacks from all failed ranks.
        """
        text = io.StringIO()
        print_matrix(Console(file=text, highlight=False, markup=False, width=screen_width()), self, verbose=verbose)
        return text.getvalue().rstrip()

    def assert_passed(self) -> None:
        """Raise `NotEquivalent` unless all layouts were checked and have their expected outcome."""
        if not self.is_passed:
            raise NotEquivalent(self.describe())


def print_matrix(console: Console, found: MatrixResult, *, verbose: bool = False) -> None:
    """Print the table, each layout's first difference, a verdict for each unexpected outcome, and the totals."""
    for part in _parts(found, console.width, verbose=verbose):
        console.print(part, soft_wrap=True)


def totals(found: MatrixResult) -> str:
    """Return a line with the number of layouts for each outcome: ``7 layouts: 6 equivalent; 1 diverged, as expected``."""
    parts = [f"{number} {what}" for what, number in Counter(map(outcome_text, found.rows)).items()]
    left = found.asked - len(found.rows)
    parts += [f"{left} not reached because the run was interrupted"] if left else []
    return f"{count(found.asked, 'layout')}: {'; '.join(parts) or 'none checked'}"


def single_device_line(found: MatrixResult) -> str:
    """Return a line about the single-device run: ``one device: first loss 0.88, gradient norm 0.69``.

    Empty if no ranks finished.
    """
    measures = next((row.measures for row in found.rows if row.measures is not None), None)
    if measures is None:
        return ""
    return f"one device: first loss {digits(measures.expected_loss)}, gradient norm {digits(measures.expected_gradient_norm)}"


def _parts(found: MatrixResult, width: int, *, verbose: bool) -> Iterator[RenderableType]:
    yield table(found.rows, width)
    yield Text(single_device_line(found), style="dim")
    for row in found.rows:
        if row.is_as_expected and difference_line(row):
            yield Text("\n".join(wrap(difference_line(row), "  ", width)), style="dim")
    for row in found.unexpected:
        yield Text(f"\n{row.name}", style="bold")
        details = row.details if verbose or row.verdict is None else row.verdict.describe()
        yield Text(escape_unprintable(details))
    yield Text(f"\n{totals(found)}", style="bold green" if found.is_passed else "bold red")
