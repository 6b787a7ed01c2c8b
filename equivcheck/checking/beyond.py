"""The check beyond limits that torch draws: there a run must be right, or raise on every rank."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.checking.check import check
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.worlds.failure import RankState


def check_beyond(scenario: Scenario, *, world: str = "sim", deadline: float = 60.0, coarse: bool = False) -> Verdict:
    """Say whether a scenario beyond a limit of torch is refused or right; one within all limits is checked as any other.

    UNSUPPORTED is what every rank raises on, KNOWN what is on file. What is wrong without an error, what hangs, and what some
    ranks alone raise on are findings, whose reason names the limit.
    """
    limit = why_unsupported(scenario)
    verdict = check(scenario, world=world, deadline=deadline, coarse=coarse, beyond=limit is not None)
    return verdict if limit is None else judged_beyond(verdict, limit)


def judged_beyond(verdict: Verdict, limit: str) -> Verdict:
    """What the verdict on a run beyond a limit comes to."""
    verdict = replace(verdict, beyond=limit)
    if raised_on_every_rank(verdict):
        return replace(verdict, outcome=Outcome.UNSUPPORTED, reason=f"{limit}; every rank raises", failure=None)
    if not verdict.outcome.is_finding:
        return verdict
    required = f"beyond a limit of torch ({limit}) a run must be right or raise on every rank"
    return replace(verdict, reason=f"{required}, but {verdict.reason}")


def raised_on_every_rank(verdict: Verdict) -> bool:
    """Whether the ranks crashed and every one of them raised, so that none is left waiting for another."""
    reports = verdict.failure.reports if verdict.failure and verdict.outcome is Outcome.CRASHED else ()
    return bool(reports) and all(report.state is RankState.RAISED for report in reports)
