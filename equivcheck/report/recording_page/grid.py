"""Cells in tables about two recorded runs. Each shows how values agree, for one step or tensor at one point in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.differences import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Cell in a table. Its text begins with a mark such as ✓ or ✗, for readers who cannot see the cell's colour."""

    style: str
    """CSS class: ``same``, ``differs``, ``single`` (only one run has the value), ``undecided`` or ``unseen``."""
    text: str
    """Mark, and the error relative to tolerance."""
    title: str = ""
    """Text shown when the reader points at the cell."""


UNSEEN = Cell(style="unseen", text="-", title="not compared")
"""Cell for values that neither run has, or that are not compared."""


def cell_of(found: Sequence[TensorDifference]) -> Cell:
    """Return one cell for several compared values.

    It shows a missing tensor or another shape or dtype, if there is one, and otherwise the largest error.
    """
    if not found:
        return UNSEEN
    wrong = [each for each in found if each.is_different]
    first = next((each for each in wrong if each.difference not in _WITH_ERROR), None)
    if first is not None:
        return _other(first, len(wrong), len(found))
    worst = max(found, key=lambda each: _sortable(each.error))
    text = f" {error_text(worst.error)}" if worst.allowed else ""  # integers and samples have no tolerance
    if not wrong:
        return Cell(style="same", text=f"✓{text}", title=f"{count(len(found), 'value')} agree{'s' if len(found) == 1 else ''}")
    return Cell(style="differs", text=f"✗{text}", title=f"{len(wrong)} of {count(len(found), 'value')} differ: {wrong[0]}")


_WITH_ERROR = (Difference.VALUE, Difference.RANKS_DISAGREE)


def _other(first: TensorDifference, num_wrong: int, num_all: int) -> Cell:
    title = f"{num_wrong} of {count(num_all, 'value')} differ: {first}"
    if first.is_undecided:
        return Cell(style="undecided", text=f"? {first.difference.value}", title=title)
    if first.difference is Difference.MISSING:
        return Cell(style="single", text=f"½ {'B' if first.detail == 'not in A' else 'A'}", title=title)
    return Cell(style="differs", text=f"✗ {first.difference.value}", title=title)


def error_text(error: float) -> str:
    """Format an error relative to tolerance with two digits."""
    if not math.isfinite(error):
        return "∞"
    return f"{error:.2g}" if error < 100 else f"{float(f'{error:.2g}'):,.0f}" if error < 1e5 else f"{error:.0e}"


def _sortable(error: float) -> float:
    return math.inf if math.isnan(error) else error
