"""What an entry of known.toml may ask of a scenario (`needs`) and of its first divergence (`shows`), by name.

A predicate stands in the file ``known.py`` of its parallelism. If it is about no single parallelism, it stands in
`equivcheck.oracle.known_issues`. Its decorator registers it, and its name is unique.
"""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.scenario import Scenario
from equivcheck.worlds.trace.differences import Divergence

Need = Callable[[Scenario], bool]
Show = Callable[[Scenario, Divergence], bool]

NEEDS: dict[str, Need] = {}
"""What an issue may ask of a scenario."""
SHOWS: dict[str, Show] = {}
"""What an issue may ask of the first divergence."""


def need(predicate: Need) -> Need:
    """Let entries name a predicate of a scenario."""
    assert predicate.__name__ not in NEEDS, f"two predicates are named {predicate.__name__}"
    NEEDS[predicate.__name__] = predicate
    return predicate


def show(predicate: Show) -> Show:
    """Let entries name a predicate of a scenario and its first divergence."""
    assert predicate.__name__ not in SHOWS, f"two predicates are named {predicate.__name__}"
    SHOWS[predicate.__name__] = predicate
    return predicate
