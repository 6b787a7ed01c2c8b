"""Predicates for entries in known.toml: `needs` tests a scenario, `shows` tests its first divergence.

A predicate for one parallelism stands in that parallelism's ``known.py``, all others in `equivcheck.oracle.known_issues`. Its
decorator registers it by a unique name.
"""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.scenario import Scenario
from equivcheck.worlds.trace.differences import Divergence

Need = Callable[[Scenario], bool]
Show = Callable[[Scenario, Divergence], bool]

NEEDS: dict[str, Need] = {}
"""Scenario predicates by name."""
SHOWS: dict[str, Show] = {}
"""Divergence predicates by name."""


def need(predicate: Need) -> Need:
    """Register a function to decide whether a scenario meets a known issue's conditions."""
    assert predicate.__name__ not in NEEDS, f"two predicates are named {predicate.__name__}"
    NEEDS[predicate.__name__] = predicate
    return predicate


def show(predicate: Show) -> Show:
    """Register a function to decide whether a known issue causes exactly the first divergence in a verdict."""
    assert predicate.__name__ not in SHOWS, f"two predicates are named {predicate.__name__}"
    SHOWS[predicate.__name__] = predicate
    return predicate
