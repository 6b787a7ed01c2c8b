"""How many scenarios this process has checked, by layout, world and outcome, for a face that sums up."""

from __future__ import annotations

from collections import Counter

IN_PART = "in part"
"""Stands for the outcome of what is equivalent up to some step, after which nothing could be decided."""

Row = tuple[str, str, str]
"""Layout, world, outcome."""

_checked: Counter[Row] = Counter()


def record(layout: str, world: str, outcome: str) -> None:
    """Count one check; `layout` as `Layout.name` writes it, `outcome` as JSON does, or `IN_PART`."""
    _checked[layout, world, outcome] += 1


def counted() -> Counter[Row]:
    """The checks counted since the last call of `take`, which stay counted."""
    return _checked.copy()


def take() -> Counter[Row]:
    """The checks counted since the last call."""
    taken = counted()
    _checked.clear()
    return taken
