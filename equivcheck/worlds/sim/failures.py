"""Builds a `Failure` for a simulated run from the states of its ranks."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from types import FrameType

from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState, causes
from equivcheck.worlds.sim.exchange import call_of
from equivcheck.worlds.sim.scheduler import Scheduler

_OWN_FILES = ("worlds/sim/scheduler.py", "worlds/sim/rank_threads.py", "worlds/sim/exchange.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortedRun:
    """Information about all ranks, collected when their run is stopped."""

    scheduler: Scheduler
    """Scheduler, which knows which ranks have ended and in which calls the others wait."""
    thread_idents: tuple[int, ...]
    """Each rank thread's `threading.get_ident`."""
    errors: dict[int, BaseException]
    """Exceptions by rank, in the order in which they were raised."""
    hung: str
    """Why ranks that still compute count as hung; empty if no rank does."""


def failure_of(evidence: AbortedRun) -> Failure:
    """Build the `Failure` for a stopped run.

    Call this before the rank threads end, because the `Failure` contains their stacks.
    """
    frames = sys._current_frames()
    size = evidence.scheduler.size
    reports = tuple(_report(rank, evidence, frames.get(evidence.thread_idents[rank])) for rank in range(size))
    kind, summary = _cause(evidence, reports)
    return Failure(kind=kind, summary=summary, reports=reports, first=next(iter(evidence.errors), None))


def with_abandoned(failure: Failure, ranks: list[int]) -> Failure:
    """Return the failure with a remark about `ranks`, whose threads could not be stopped and still run."""
    if not ranks:
        return failure
    names = ", ".join(map(str, ranks))
    what = f"ranks that could not be stopped still run in this process, so later runs in it prove nothing: {names}"
    return replace(failure, summary=f"{failure.summary}; {what}", remark=what)


def _cause(evidence: AbortedRun, reports: tuple[RankReport, ...]) -> tuple[FailureKind, str]:
    for rank in evidence.errors:
        return FailureKind.RAISED, f"rank {rank} raised {reports[rank].error}"
    if evidence.scheduler.mismatch:
        return FailureKind.MISMATCH, f"collectives do not match: {evidence.scheduler.mismatch}"
    states = "; ".join(f"rank {report.rank} {_doing(report)}" for report in reports)
    if evidence.hung:
        return FailureKind.TIMEOUT, f"{evidence.hung}: {states}"
    return FailureKind.DEADLOCK, f"no rank can continue: {states}"


def _doing(report: RankReport) -> str:
    if report.state is RankState.WAITING:
        return f"waits in {report.pending}" if report.pending else "waits for its turn"
    return str(report.state.value)


def _report(rank: int, evidence: AbortedRun, frame: FrameType | None) -> RankReport:
    error = evidence.errors.get(rank)
    if error is not None:
        text = "".join(traceback.format_exception_only(error)).strip() + causes(error)
        return RankReport(rank=rank, state=RankState.RAISED, error=text, stack="".join(traceback.format_exception(error)))
    scheduler = evidence.scheduler
    if scheduler.ended[rank]:
        return RankReport(rank=rank, state=RankState.FINISHED)
    # Frames of the thread loop and of locks tell the reader nothing.
    entries = traceback.extract_stack(frame) if frame is not None else []
    kept = [entry for entry in entries if not entry.filename.replace("\\", "/").endswith((*_OWN_FILES, "/threading.py"))]
    stack = "".join(traceback.StackSummary.from_list(kept).format())
    pending = scheduler.pending[rank]
    if pending is None and scheduler.holder == rank:
        return RankReport(rank=rank, state=RankState.RUNNING, stack=stack)
    text = "" if pending is None else call_of(pending).describe()
    return RankReport(rank=rank, state=RankState.WAITING, pending=text, stack=stack)
