"""Where mutants may be planted: names of layouts, and what of a scenario keeps a fault from being planted."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.composition.registry import COMPOSITIONS
from equivcheck.scenario import Precision, Scenario
from equivcheck.scenario.parallelism import PARALLELISMS

EVERYWHERE: tuple[str, ...] = (*(kind.tag for kind in PARALLELISMS), *COMPOSITIONS)
"""Every layout that ships with the package."""


def within(*tags: str) -> tuple[str, ...]:
    """Every layout that has one of these parallelisms, those of one parallelism first."""
    return tuple(name for name in EVERYWHERE if not set(name.split(" x ")).isdisjoint(tags))


TELLING_RATE = 1e-3
"""The least learning rate at which, in float32, an update is well above the rounding of what it updates."""


def updates_tell(scenario: Scenario) -> bool:
    """Whether an update is more than rounding: in float32, one at a rate of 5e-5 and of twice that may be the same numbers."""
    return scenario.training.precision is Precision.FLOAT64 or scenario.training.optimizer.lr >= TELLING_RATE


def both(*conditions: Callable[[Scenario], bool]) -> Callable[[Scenario], bool]:
    """Whether all of several conditions hold."""
    return lambda scenario: all(condition(scenario) for condition in conditions)
