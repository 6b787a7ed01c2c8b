"""Choosing which of the scenarios that are drawn are checked: drawing one costs a small part of checking it."""

from __future__ import annotations

from collections import deque

from equivcheck.coverage.reach import Reach
from equivcheck.scenario import Scenario

WINDOW = 40
"""Scenarios drawn for each that is checked, about, as long as there are pairs of features that have not come together."""
WINDOW_OF_COMPILED = 4
"""The same for those that are compiled, which cost hundreds of others, and would always bring something new."""


class Novelty:
    """Wants a scenario that brings at least as many new pairs of features as any of its kind drawn just before it.

    When nothing brings new pairs any more it wants every one: no scenario is left out for good. Compiled scenarios, and those
    whose steps are traced, are kinds of their own, so that they are not checked much more often than they are drawn.
    """

    def __init__(self) -> None:
        self._reach = Reach()
        self._recent: dict[tuple[bool, bool], deque[int]] = {}

    def wants(self, scenario: Scenario) -> bool:
        """Whether to check a scenario; if so it counts as checked."""
        kind, new = _kind(scenario), self._reach.gain(scenario)
        window = WINDOW_OF_COMPILED if kind[0] else WINDOW
        recent = self._recent.setdefault(kind, deque(maxlen=window - 1))
        wanted = new >= max(recent, default=0)
        recent.append(new)
        if wanted:
            self._reach.add(scenario)
        return wanted


def _kind(scenario: Scenario) -> tuple[bool, bool]:
    """Whether any of its layouts compiles, and whether any traces steps."""
    executions = [layout.execution for layout in scenario.layouts]
    return any(execution.is_compiled for execution in executions), any(execution.whole_step for execution in executions)
