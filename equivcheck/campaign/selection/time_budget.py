"""Time budgets for compiled and traced scenarios, which cost as much as hundreds of others."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.scenario import Scenario

COMPILED_SHARE = 0.15
"""Largest share of a worker's expected time for compiled scenarios."""
TRACED_SHARE = 0.1
"""Largest share for traced steps. Without it, 5 % of the drawn scenarios took a third of the time."""


class TimeBudget:
    """Budget of `seconds` for scenarios with an expected duration."""

    def __init__(self, seconds: float, expected: Callable[[Scenario], float], *, start: float = 0.0) -> None:
        """The first scenario also costs `start` seconds."""
        self._left, self._expected = seconds - start, expected

    def allows(self, scenario: Scenario) -> bool:
        """Whether the budget covers the expected duration; always True if that is 0."""
        expected = self._expected(scenario)
        return expected == 0.0 or expected <= self._left

    def spend(self, scenario: Scenario) -> None:
        """Subtract the expected duration. The measured one would depend on the machine's load."""
        self._left -= self._expected(scenario)
