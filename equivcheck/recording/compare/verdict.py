"""Verdicts on two recorded runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

_MOST = 8
"""Differences that `describe` prints after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Difference between two runs in one tensor."""

    step: int
    """Step, from 0."""
    moment: Moment
    """Moment within the step."""
    tensor: str
    """Name."""
    difference: Difference
    """Kind."""
    distance: float = 0.0
    """Estimated 2-norm between both runs, or between replicas if ranks disagree."""
    norm: float = 0.0
    """The tensor's 2-norm in the first run."""
    allowed: float = 0.0
    """Distance that rounding explains; 0 for integers."""
    eps: float = 0.0
    """Machine epsilon for the dtype; 0 for integers."""
    detail: str = ""
    """Clause with both sides, such as ``shape (4, 3), not (4, 2)``."""
    is_undecided: bool = False
    """Whether both runs have NaN or infinite values, so that nothing can be compared."""

    @property
    def error(self) -> float:
        """Distance divided by the allowed distance; 0 if both are 0."""
        return self.distance / self.allowed if self.allowed else math.inf if self.distance else 0.0

    @property
    def is_different(self) -> bool:
        """Whether rounding does not explain it, or another difference than in values was found."""
        return self.difference is not Difference.VALUE or not self.distance <= self.allowed

    def __str__(self) -> str:
        place = f"step {self.step} {self.moment.value} {self.tensor}"
        if self.detail:
            return f"{place}: {self.detail}"
        return f"{place}: distance {self.distance:.3g}, norm {self.norm:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceVerdict(Judgement):
    """Result from `compare`: EQUIVALENT, DIVERGED or INCONCLUSIVE."""

    world: str = "recorded"
    """Always ``recorded``: the runs took place before."""
    differences: tuple[TensorDifference, ...] = ()
    """Tensors above their tolerance, in training order."""
    coverage: tuple[str, ...] = ()
    """Compared moments and steps, differing environments, and losses if a step differs: one clause each."""

    def describe(self) -> str:
        """Outcome and evidence as text. `print(verdict)` shows it."""
        lines = [f"{self.outcome.value.upper()}: {self.reason}"]
        others = [line for line in map(str, self.differences) if not self.reason.startswith(line)]
        lines += [f"  then {line}" for line in others[:_MOST]]
        left = len(others) - _MOST
        lines += [f"  and {left} more"] if left > 0 else []
        return "\n".join([*lines, *(f"  {each}" for each in self.coverage)])
