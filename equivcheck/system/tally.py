"""Count this process's checks by layout, world and outcome, for the pytest summary."""

from __future__ import annotations

from collections import Counter

IN_PART = "in part"
"""Outcome for a check that was equivalent up to some step and undecided afterwards."""

Row = tuple[str, str, str]
"""Layout, world and outcome."""

_checked: Counter[Row] = Counter()


def record(layout: str, world: str, outcome: str) -> None:
    """Count one check. `layout` is `Layout.name`; `outcome` is the value in JSON or `IN_PART`."""
    _checked[layout, world, outcome] += 1


def counted() -> Counter[Row]:
    """Checks counted since the last `take`. The counts stay."""
    return _checked.copy()


def take() -> Counter[Row]:
    """Checks counted since the last `take`. The counts are reset."""
    taken = counted()
    _checked.clear()
    return taken
