"""Checks scenarios beyond torch's known limits: such a run must be correct or fail on every rank."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.checking.check import check
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.worlds.failure import RankState


def check_beyond(scenario: Scenario, *, world: str = "sim", deadline: float = 60.0, coarse: bool = False) -> Verdict:
    """Check a scenario even if it violates torch's known limits. Other scenarios are checked as usual.

    If a limit is violated, the outcome is UNSUPPORTED if every rank raises, and KNOWN if a known issue explains the failure.
    Silently wrong values, hangs, and errors on only some ranks are findings; their reason names the limit.
    """
    limit = why_unsupported(scenario)
    verdict = check(scenario, world=world, deadline=deadline, coarse=coarse, beyond=limit is not None)
    return verdict if limit is None else judged_beyond(verdict, limit)


def judged_beyond(verdict: Verdict, limit: str) -> Verdict:
    """Convert a usual verdict to the verdict that `check_beyond` returns. `limit` describes the violated limit."""
    verdict = replace(verdict, beyond=limit)
    if raised_on_every_rank(verdict):
        return replace(verdict, outcome=Outcome.UNSUPPORTED, reason=f"{limit}; every rank raises", failure=None)
    if not verdict.outcome.is_finding:
        return verdict
    required = f"a run beyond a limit of torch ({limit}) must be correct or fail on every rank"
    return replace(verdict, reason=f"{required}, but {verdict.reason}")


def raised_on_every_rank(verdict: Verdict) -> bool:
    """Whether all ranks raised an exception, so that no rank waits for another."""
    reports = verdict.failure.reports if verdict.failure and verdict.outcome is Outcome.CRASHED else ()
    return bool(reports) and all(report.state is RankState.RAISED for report in reports)
