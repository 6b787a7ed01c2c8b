"""Count the checks in this process by layout, world and outcome. The pytest summary prints the counts."""

from __future__ import annotations

from collections import Counter

IN_PART = "in part"
"""Outcome of a check that was equivalent up to some step and undecided afterwards."""

TallyRow = tuple[str, str, str]
"""Layout, world and outcome."""

_checked: Counter[TallyRow] = Counter()


def record_check(layout: str, world: str, outcome: str) -> None:
    """Count one check of a layout (named as in `Layout.name`) in a world.

    `outcome` is a value of `Outcome`, or `IN_PART` if the check is EQUIVALENT but could not judge its last steps.
    """
    _checked[layout, world, outcome] += 1


def current_counts() -> Counter[TallyRow]:
    """Return how many checks were counted since the last `take_counts`, for each layout, world and outcome."""
    return _checked.copy()


def take_counts() -> Counter[TallyRow]:
    """Return the counts like `current_counts`, then start again from zero."""
    taken = current_counts()
    _checked.clear()
    return taken
