"""Which of the scenarios that a worker draws are worth its time."""

from __future__ import annotations

from equivcheck.coverage.novelty import Novelty
from equivcheck.layouts.execution.compile_time import expected_compile_seconds
from equivcheck.scenario import Scenario

COMPILED_SHARE = 0.15
"""Of a worker's time, at most, for what is compiled, of which one scenario costs hundreds of others."""
_REMEMBERED = 100_000
"""Scenarios after which what was checked is forgotten: some megabytes."""


class Selection:
    """Wants what was not checked before, what there is time for, and what brings something new."""

    def __init__(self, seconds: float) -> None:
        self._compile_budget = CompileBudget(seconds)
        self._novelty = Novelty()
        self._checked: set[int] = set()

    def wants(self, scenario: Scenario) -> bool:
        """Whether to check a scenario; if so it counts as checked.

        Hypothesis draws one scenario in several ways, and starts every batch simple.
        """
        mark = hash(scenario)
        if mark in self._checked or not self._compile_budget.allows(scenario) or not self._novelty.wants(scenario):
            return False
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked.add(mark)
        return True

    def spend(self, scenario: Scenario, seconds: float) -> None:
        """Count what a check has taken."""
        self._compile_budget.spend(scenario, seconds)


class CompileBudget:
    """Lets a scenario that compiles pass while there is time for it; `seconds` are all that the worker has."""

    def __init__(self, seconds: float) -> None:
        self._left = COMPILED_SHARE * seconds

    def allows(self, scenario: Scenario) -> bool:
        """Whether there is time for what a scenario is expected to compile; always where it compiles nothing."""
        expected = expected_compile_seconds(scenario)
        return expected == 0.0 or expected <= self._left

    def spend(self, scenario: Scenario, seconds: float) -> None:
        """Count what a check has taken."""
        if expected_compile_seconds(scenario):
            self._left -= seconds
