"""How a worker shares its time between what is compiled, of which one costs hundreds of others, and everything else."""

from __future__ import annotations

from equivcheck.layouts.execution.compile_time import expected_compile_seconds
from equivcheck.scenario import Scenario

COMPILED_SHARE = 0.15
"""Of a worker's time, at most, for what is compiled."""


class Pace:
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
