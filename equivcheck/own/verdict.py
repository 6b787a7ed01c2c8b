"""The outcome of `check_training`, with its evidence."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from equivcheck.errors import NotEquivalent
from equivcheck.oracle.verdict import Divergence, Outcome
from equivcheck.worlds.failure import Failure, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVerdict:
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

    def describe(self) -> str:
        """A few lines for people."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        lines = [f"{self.outcome.value.upper()}: a training of yours on {axes}, {self.precision}, in {self.world}"]
        if self.failure is None or self.failure.hung:
            lines.append(f"  {self.reason or f'the largest error is {self.worst_error:.2g} of its tolerance'}")
        if self.followers:
            lines.append(f"  also differing: {'; '.join(self.followers[:SHOWN])}{_more(len(self.followers) - SHOWN)}")
        if self.hint:
            lines.append(f"  {self.hint}")
        if self.unread:
            lines.append(f"  not compared, as no rank could hand it over: {', '.join(self.unread)}")
        if self.failure is not None:
            lines += _of_ranks(self.failure)
        return "\n".join(lines)


SHOWN = 4
"""Followers that `describe` names."""


FRAMES = 8
"""Last lines that `describe` shows of a traceback."""


def _of_ranks(failure: Failure) -> list[str]:
    """Where each rank was, those in the same place in one line, and how the first that raised came there."""
    reports, places = failure.reports, defaultdict[str, list[str]](list)
    for report in reports:
        places[" ".join(f"{report.state.value} {report.error or report.pending}".split())].append(str(report.rank))
    lines = [f"  rank {', '.join(members)} {where}" for where, members in places.items()]
    raised = next((report for report in reports if report.state is RankState.RAISED and report.stack), None)
    return lines if raised is None else [*lines, *(f"    {line}" for line in _frames(raised.stack)[-FRAMES:])]


def _frames(stack: str) -> list[str]:
    """The lines of a traceback without those that underline parts of others."""
    return [line for line in stack.rstrip().splitlines() if line.strip(" ^~")]


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
