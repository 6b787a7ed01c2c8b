"""What part of a worker's time goes to scenarios that compile or trace, of which one costs as much as hundreds of others."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.scenario import Scenario

COMPILED_SHARE = 0.15
"""Of a worker's time, as it is expected, at most, for what is compiled."""
TRACED_SHARE = 0.1
"""The same for steps that are traced: a twentieth of what is drawn, they took a third of the time."""


class TimeBudget:
    """Lets a scenario that costs such time pass while there is some left."""

    def __init__(self, seconds: float, expected: Callable[[Scenario], float], *, start: float = 0.0) -> None:
        """`start` seconds are spent with the first."""
        self._left, self._expected = seconds - start, expected

    def allows(self, scenario: Scenario) -> bool:
        """Whether there is time for what a scenario is expected to take; always where that is none."""
        expected = self._expected(scenario)
        return expected == 0.0 or expected <= self._left

    def spend(self, scenario: Scenario) -> None:
        """Count what a check is expected to take, which is the same on a busy machine."""
        self._left -= self._expected(scenario)
