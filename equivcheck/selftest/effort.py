"""How much is spent on each mutant."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The budget of one mutant; the first that is used up ends the drawing of scenarios."""

    seed: int = 0
    """With the name of a mutant it decides everything that is drawn; at least 0."""
    examples: int = 200
    """Scenarios drawn at most, 1 to 500."""
    seconds: float = 120.0
    """Time for drawing and checking, above 0; shrinking and explaining come after it."""
    reached_after_catch: int = 5
    """Further scenarios in which the mutant changes something, once one has been caught."""
    shrink_seconds: float = 20.0
    """Limit for shrinking."""
    deadline: float = 10.0
    """Limit for one run of the ranks, in seconds."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"Effort.seed is {self.seed}; allowed: at least 0")
        if not 1 <= self.examples <= 500:
            raise UsageError(f"Effort.examples is {self.examples}; allowed: 1 to 500")
        if not self.seconds > 0:
            raise UsageError(f"Effort.seconds is {self.seconds}; allowed: above 0")
