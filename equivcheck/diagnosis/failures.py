"""Explains a hang or a crash by each rank's state at that time."""

from __future__ import annotations

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.worlds.failure import Failure, RankReport, RankState


def diagnosis_of_failure(failure: Failure) -> Diagnosis:
    """Name the rank that failed, or the collective calls that differ between ranks."""
    culprit = failure.culprit
    if culprit is not None and not failure.hung:
        return Diagnosis(cause=Cause.RANK_FAILED, sentence=_of_failed(culprit, failure.reports), exact=True)
    return Diagnosis(cause=Cause.CALLS_DIFFER, sentence=_of_calls(failure.reports), exact=True)


def _of_failed(first: RankReport, reports: tuple[RankReport, ...]) -> str:
    failed = [report for report in reports if report.has_failed]
    who = "every rank" if len(failed) == len(reports) else _ranks(failed)
    verb = "raises" if first.state is RankState.RAISED else "dies:"
    waiting = [report for report in reports if report.state is RankState.WAITING]
    wait = f"; {_ranks(waiting)} {_verb(waiting, 'waits', 'wait')} in {waiting[0].pending}" if waiting else ""
    return f"{who} {verb} {_error(first)}{wait}"


def _of_calls(reports: tuple[RankReport, ...]) -> str:
    groups: dict[str, list[RankReport]] = {}
    for report in reports:
        groups.setdefault(_doing(report), []).append(report)
    parts = [f"{_ranks(group)} {_verb(group, *doing.split('|'))}" for doing, group in groups.items()]
    return f"ranks issue different communication calls: {'; '.join(parts)}"


def _doing(report: RankReport) -> str:
    """Return verb phrases for the rank's activity, in the singular and the plural, separated by `|`."""
    if report.state is RankState.WAITING:
        return f"waits in {report.pending}|wait in {report.pending}"
    if report.has_failed:
        return f"fails: {_error(report)}|fail: {_error(report)}"
    return "has finished|have finished" if report.state is RankState.FINISHED else "is still computing|are still computing"


def _error(report: RankReport) -> str:
    return report.error.splitlines()[0] if report.error else "without an error message"


def _ranks(reports: list[RankReport]) -> str:
    return name_ranks([report.rank for report in reports])


def _verb(reports: list[RankReport], one: str, many: str) -> str:
    return one if len(reports) == 1 else many
