"""Choosing which of the scenarios that are drawn are checked: drawing one costs a small part of checking it."""

from __future__ import annotations

from collections import deque

from equivcheck.coverage.reach import Reach
from equivcheck.scenario import Scenario

WINDOW = 8
"""Scenarios drawn for each that is checked, about, as long as there are pairs of features that have not come together."""


class Novelty:
    """Wants a scenario that brings at least as many new pairs of features as any of those drawn just before it.

    When nothing brings new pairs any more it wants every one: no scenario is left out for good.
    """

    def __init__(self) -> None:
        self._reach = Reach()
        self._recent: deque[int] = deque(maxlen=WINDOW - 1)

    def wants(self, scenario: Scenario) -> bool:
        """Whether to check a scenario; if so it counts as checked."""
        new = self._reach.gain(scenario)
        wanted = new >= max(self._recent, default=0)
        self._recent.append(new)
        if wanted:
            self._reach.add(scenario)
        return wanted
