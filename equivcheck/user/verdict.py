"""The outcome of `check_training`, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.errors import NotEquivalent
from equivcheck.trace.differences import Divergence
from equivcheck.verdict.description import of_divergence, of_ranks
from equivcheck.verdict.verdict import Outcome
from equivcheck.worlds.failure import Failure, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class UserVerdict:
    """What `check_training` returns."""

    outcome: Outcome
    """EQUIVALENT, DIVERGED, CRASHED, HUNG or INCONCLUSIVE."""
    mesh: tuple[tuple[str, int], ...]
    """Names and sizes of the axes."""
    world: str
    """Where the ranks ran."""
    precision: str
    """The coarsest element type that the training passes through on one device: tolerances are measured in its units."""
    reason: str = ""
    """One sentence for people; empty when equivalent."""
    divergence: Divergence | None = None
    """The first divergence; None unless diverged."""
    followers: tuple[str, ...] = ()
    """Other tensors that differ, in order, at most 20."""
    hint: str = ""
    """What may explain a divergence, in a sentence; empty where nothing is known."""
    failure: Failure | None = None
    """What happened to the ranks; None unless crashed or hung."""
    unread: tuple[str, ...] = ()
    """Optimizer state that no rank could hand over, and that was not compared."""
    worst_error: float = 0.0
    """The largest error over all tensors in units of tolerance; below 1 when equivalent."""
    seconds: float = 0.0
    """Time of the whole check."""

    def assert_equivalent(self) -> None:
        """Raise `NotEquivalent` unless the outcome is EQUIVALENT: also where nothing could be established."""
        if self.outcome is not Outcome.EQUIVALENT:
            raise NotEquivalent(self.describe())

    def assert_no_finding(self) -> None:
        """Raise `NotEquivalent` if the outcome is DIVERGED, CRASHED or HUNG; what could not be established passes."""
        if self.outcome.is_finding:
            raise NotEquivalent(self.describe())

    def describe(self) -> str:
        """A few lines for people."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        heading = f"{self.outcome.value.upper()}: a training of yours on {axes}, {self.precision}, in {self.world}"
        return "\n".join([heading, *(f"  {line}" for line in self._evidence())])

    def _evidence(self) -> list[str]:
        lines = [self.reason or f"the largest error is {self.worst_error:.2g} of its tolerance"]
        if self.divergence is not None:
            lines = of_divergence(self.divergence, self.followers)
        elif self.failure is not None:
            lines = [*of_ranks(self.failure), *_frames(self.failure)]
        if self.hint:
            lines.append(f"why:   {self.hint}")
        if self.unread:
            lines.append(f"not compared, as no rank could hand it over: {', '.join(self.unread)}")
        return lines


FRAMES = 8
"""Last lines that `describe` shows of a traceback."""


def _frames(failure: Failure) -> list[str]:
    """The end of the traceback of the first rank that raised, without lines that underline parts of others."""
    stack = next((report.stack for report in failure.reports if report.state is RankState.RAISED), "")
    return [f"  {line}" for line in stack.rstrip().splitlines() if line.strip(" ^~")][-FRAMES:]
