"""Training x Layout: the only thing that a failure needs."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario.layout import Layout
from equivcheck.scenario.ranges import require_between
from equivcheck.scenario.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One training, one way to spread it, one interleaving of the ranks."""

    training: Training
    """What is trained."""
    layout: Layout
    """How it is spread."""
    schedule_seed: int = 0
    """Which order simulated ranks run in, 0 to 2**32 - 1; 0 is lowest rank first."""

    def __post_init__(self) -> None:
        require_between(self, "schedule_seed", 0, 2**32 - 1)
