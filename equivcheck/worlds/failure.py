"""A run's failure as plain data, so that it can be pickled and stored in a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.errors import EquivCheckError
from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.call import Call


class RankState(PrintableEnum):
    """One rank's state when the run was stopped."""

    FINISHED = "finished"
    RAISED = "raised"
    WAITING = "waiting"
    RUNNING = "running"
    DIED = "died"


class FailureKind(PrintableEnum):
    """Why a run on N ranks was stopped without a result."""

    RAISED = "raised"
    DIED = "died"
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Report on one rank in a failed run."""

    rank: int
    """Global rank, from 0."""
    state: RankState
    """Rank's state when the run was stopped."""
    error: str = ""
    """For a rank that raised: ``Type: message`` of the exception and its causes. For a rank whose process ended: how it ended,
    such as ``killed by SIGKILL`` or ``exited with code 3``. Empty for other ranks.
    """
    pending: str = ""
    """Collective in which the rank waits, as written by `Call.describe`; empty for other ranks."""
    stack: str = ""
    """Python stack or traceback of the rank, innermost frame last; empty if none could be read."""

    @property
    def has_failed(self) -> bool:
        """Whether the rank raised or died."""
        return self.state in (RankState.RAISED, RankState.DIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run on N ranks gave no result."""

    kind: FailureKind
    """Kind of the first cause. If a rank raised or died, the kind says this, even if other ranks then hung."""
    summary: str
    """One line for the user, with the rank and the problem."""
    reports: tuple[RankReport, ...]
    """One report for each rank, in rank order."""
    first: int | None = None
    """First rank that raised or died, perhaps the reason why others failed; None if ranks only hung."""
    remark: str = ""
    """Last part of the summary: the hosts, or ranks that could not be stopped. Empty if there is nothing to say about them."""

    @property
    def culprit(self) -> RankReport | None:
        """Report on the rank that failed first, or on the lowest failed rank if the order is unknown.

        None if no rank raised or died.
        """
        failed = [report for report in self.reports if report.has_failed]
        return next((report for report in failed if report.rank == self.first), failed[0] if failed else None)

    @property
    def hung(self) -> bool:
        """Whether ranks hung although no rank raised or died."""
        return self.kind in (FailureKind.DEADLOCK, FailureKind.MISMATCH, FailureKind.TIMEOUT)


CAUSED_BY = ", caused by "
"""Text before each cause of an error."""


def causes(error: BaseException) -> str:
    """Describe an exception's chain of causes, each as ``, caused by Type: message``. Empty if `error` has no ``__cause__``."""
    cause = error.__cause__
    return "" if cause is None else f"{CAUSED_BY}{type(cause).__name__}: {cause}{causes(cause)}"


class RanksFailed(EquivCheckError):
    """At least one rank did not finish the program.

    `failure` says why; `calls` holds each rank's communication calls if the world records them.
    """

    def __init__(self, failure: Failure, calls: tuple[tuple[Call, ...], ...] = ()) -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.calls = calls

    def __reduce__(self) -> tuple[type[RanksFailed], tuple[Failure, tuple[tuple[Call, ...], ...]]]:
        return type(self), (self.failure, self.calls)


class RanksDidNotStart(EquivCheckError):
    """The ranks could not connect to each other, so the program did not run."""


class RanksLost(RanksDidNotStart):
    """A process ended before all ranks were connected. The process may have been killed from outside, so a retry can succeed."""


def last_line(printed: str) -> str:
    """Return the last line of a printed error, without its traceback."""
    lines = printed.strip().splitlines()
    return lines[-1].strip() if lines else ""
