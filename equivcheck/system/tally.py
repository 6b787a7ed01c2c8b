"""Count this process's checks by layout, world and outcome, for the pytest summary."""

from __future__ import annotations

from collections import Counter

IN_PART = "in part"
"""Outcome of a check that was equivalent up to some step and undecided afterwards."""

TallyRow = tuple[str, str, str]
"""Layout, world and outcome."""

_checked: Counter[TallyRow] = Counter()


def record_check(layout: str, world: str, outcome: str) -> None:
    """Count one check of a layout, named as `Layout.name`.

    `outcome` is its value in JSON, or `IN_PART` if later steps are undecided.
    """
    _checked[layout, world, outcome] += 1


def current_counts() -> Counter[TallyRow]:
    """Return the checks counted since the last `take_counts`, without resetting the counts."""
    return _checked.copy()


def take_counts() -> Counter[TallyRow]:
    """Return the checks counted since the last `take_counts`, and reset the counts."""
    taken = current_counts()
    _checked.clear()
    return taken
