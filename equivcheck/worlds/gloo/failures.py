"""Builds a `Failure` from ranks' answers and busy ranks' stacks."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from equivcheck.worlds.gloo.answer import Raised
from equivcheck.worlds.gloo.matching.journal import Mismatch
from equivcheck.worlds.gloo.member import Member
from equivcheck.worlds.gloo.stacks import Stack, ask_for_stacks, awaited_call, is_asleep, read_stack

_SUMMARY_WIDTH = 300
"""Maximum characters for an error in the summary."""

_FUNCTION = re.compile(r'^  File ".*", line \d+, in (.*)$', re.MULTILINE)
"""Pattern for one frame in a printed stack; the group is the function's name."""


def died_report(member: Member, exit_code: int | None) -> RankReport:
    """Return a report on a rank whose process has ended. The report contains the process's last output instead of a stack."""
    return RankReport(rank=member.rank, state=RankState.DIED, error=_end_in_words(exit_code), stack=member.printed())


def raised_report(rank: int, what: Raised) -> RankReport:
    """Return a report on a rank whose program raised the exception in `what`."""
    return RankReport(rank=rank, state=RankState.RAISED, error=what.error, stack=what.stack)


def unfinished_reports(members: Sequence[Member], threads: Sequence[int]) -> list[RankReport]:
    """Return a report on each rank that has not finished its program. `threads` contains the id of each rank's main thread."""
    asleep = [is_asleep(member.pid) for member in members]  # before the signal wakes them
    ask_for_stacks(tuple(member.pid for member in members))
    stacks = [read_stack(member.stacks.fileno(), thread) for member, thread in zip(members, threads, strict=True)]
    return [busy_report(member.rank, stack, sleeping) for member, stack, sleeping in zip(members, stacks, asleep, strict=True)]


def failure_of(reports: Sequence[RankReport], times: Mapping[int, float], why: str | Mismatch) -> Failure:
    """Build the `Failure` for a run from the reports on all ranks.

    `times` contains the time at which each failed rank raised. `why` is the reason for stopping the other ranks: a text or a
    `Mismatch`.
    """
    if isinstance(why, Mismatch):
        reports = _waiting(reports, why)
        kind, first, summary = FailureKind.MISMATCH, None, f"collectives do not match: {why.text}"
    else:
        kind, first, summary = FailureKind.TIMEOUT, None, f"{why}: " + ", ".join(map(_doing, reports))
    if dead := [report for report in reports if report.state is RankState.DIED]:
        kind, first, summary = FailureKind.DIED, dead[0].rank, f"rank {dead[0].rank} {dead[0].error}"
    elif culprits := [report for report in reports if report.state is RankState.RAISED]:
        culprit = _first(culprits, times)
        kind, first, summary = FailureKind.RAISED, culprit.rank, f"rank {culprit.rank} raised {_one_line(culprit.error)}"
    return Failure(kind=kind, summary=summary, reports=tuple(reports), first=first)


def _waiting(reports: Sequence[RankReport], mismatch: Mismatch) -> list[RankReport]:
    """Return reports in which mismatched calls are pending, unless their ranks have continued."""
    calls = dict(mismatch.calls)
    return [
        replace(report, state=RankState.WAITING, pending=calls[report.rank])
        if report.rank in calls and report.state in (RankState.WAITING, RankState.RUNNING)
        else report
        for report in reports
    ]


def _first(reports: Sequence[RankReport], times: Mapping[int, float]) -> RankReport:
    """Return the report for the first rank that raised.

    Among equal errors it is the lowest rank, so that a repeated run names the same rank.
    """
    earliest = min(reports, key=lambda report: times[report.rank])
    return next(report for report in reports if report.error == earliest.error)


def _end_in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "was lost: its process has closed the channel"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def busy_report(rank: int, stack: Stack, asleep: bool) -> RankReport:
    """Return a report on a rank that has not finished.

    `asleep` says whether its process was blocked. Only a blocked process is reported as waiting for other ranks.
    """
    pending = awaited_call(stack) if asleep else ""
    state = RankState.WAITING if pending else RankState.RUNNING
    return RankReport(rank=rank, state=state, pending=pending, stack="".join(stack.format()))


def _doing(report: RankReport) -> str:
    innermost = _FUNCTION.findall(report.stack)
    where = report.pending or (innermost[-1] if innermost else "")
    return f"rank {report.rank} {report.state.value}" + (f" in {where}" if where else "")


def _one_line(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= _SUMMARY_WIDTH else line[: _SUMMARY_WIDTH - 3] + "..."
