"""What went wrong when ranks did not all finish: data, so that it can cross processes and be kept in a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.errors import EquivCheckError
from equivcheck.system.choice import Choice
from equivcheck.worlds.call import Call


class RankState(Choice):
    """Where one rank was when its world gave up."""

    FINISHED = "finished"
    RAISED = "raised"
    WAITING = "waiting"
    RUNNING = "running"
    DIED = "died"


class FailureKind(Choice):
    """Why a world gave up."""

    RAISED = "raised"
    DIED = "died"
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's part in a failure."""

    rank: int
    """Global rank, from 0."""
    state: RankState
    """Where the rank was when the world gave up."""
    error: str = ""
    """``Type: message`` of what it raised and of what caused that, or how it died (``killed by SIGKILL``, ``exited with
    code 3``); else empty."""
    pending: str = ""
    """The collective that it waits in, as `Call.describe` writes it; else empty."""
    stack: str = ""
    """Its Python stack (or traceback), innermost frame last; empty when it could not be had."""

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself."""
        return self.state in (RankState.RAISED, RankState.DIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run of N ranks gave no result."""

    kind: FailureKind
    """The first cause: a rank that raised or died comes before the hang that it caused in the others."""
    summary: str
    """One line for people: which rank, what."""
    reports: tuple[RankReport, ...]
    """One report a rank, in rank order."""
    first: int | None = None
    """The rank that failed first, which others may have failed for; None where ranks waited in vain."""

    @property
    def culprit(self) -> RankReport | None:
        """The report of the rank that failed first; where that is not known, of the lowest that failed; None if none did."""
        failed = [report for report in self.reports if report.failed]
        return next((report for report in failed if report.rank == self.first), failed[0] if failed else None)

    @property
    def hung(self) -> bool:
        """Whether ranks waited for each other in vain, rather than one of them failing by itself."""
        return self.kind in (FailureKind.DEADLOCK, FailureKind.MISMATCH, FailureKind.TIMEOUT)


def causes(error: BaseException) -> str:
    """``, caused by Type: message`` for each error that another was raised from; empty where there is none."""
    cause = error.__cause__
    return "" if cause is None else f", caused by {type(cause).__name__}: {cause}{causes(cause)}"


class RanksFailed(EquivCheckError):
    """At least one rank did not finish; `failure` says which and why, `calls` what each issued, where the world sees that."""

    def __init__(self, failure: Failure, calls: tuple[tuple[Call, ...], ...] = ()) -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.calls = calls

    def __reduce__(self) -> tuple[type[RanksFailed], tuple[Failure, tuple[tuple[Call, ...], ...]]]:
        return type(self), (self.failure, self.calls)


class RanksDidNotStart(EquivCheckError):
    """The ranks could not make their world, which says nothing about the program."""


class RanksLost(RanksDidNotStart):
    """A process ended before they had made it: perhaps killed by somebody, and then not again."""


def last_line(printed: str) -> str:
    """What an error that was printed says, without its traceback."""
    lines = printed.strip().splitlines()
    return lines[-1].strip() if lines else ""
