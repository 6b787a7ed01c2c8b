"""A campaign as `fuzz` runs it, with a search for each mutant in each checked scenario.

The campaign draws, chooses and checks as it would without mutants. One campaign therefore tells for every mutant after how much
CPU time it would have been caught. The search for mutants does not count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equivcheck.campaign.plan import Plan, frontier_scenarios, oracle_check
from equivcheck.campaign.workers.messages import MayShrink
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.campaign.workers.worker import Worker
from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.quality.selftest.jobs import JobPlan, run_jobs, serve
from equivcheck.scenario import Scenario
from equivcheck.worlds.work_clock import WorkClock
from tools.race.result import CampaignRun, Catch, Distance, Race

_SILENT_SECONDS = 600.0
"""A process without a message for so long is stuck. No scenario takes as long, even with all mutants."""


def race(
    distance: Distance,
    *,
    seed: int = 0,
    num_campaigns: int = 2,
    num_workers: int = 1,
    listener: Callable[[CampaignRun, int], None] = lambda _run, _count: None,
) -> Race:
    """Run campaigns with consecutive seeds, each in its own process. SIGINT or SIGTERM ends the race with its results so far."""
    work: JobPlan[int, CampaignRun] = JobPlan(
        module=__name__, effort=distance, blank=lambda one: CampaignRun(seed=one), limit=_SILENT_SECONDS
    )
    found = run_jobs(range(seed, seed + num_campaigns), work, num_workers=num_workers, listener=listener)
    return Race(campaigns=found.results, distance=distance, interrupted=found.interrupted)


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd`; jobs are seeds."""
    serve(fd, run_campaign, lambda seed: CampaignRun(seed=seed))


def run_campaign(seed: int, distance: Distance, tell: Callable[[CampaignRun], None] = lambda _run: None) -> CampaignRun:
    """Check until every mutant is caught or the CPU time is spent; `tell` gets the campaign after each check."""
    course = _Course(CampaignRun(seed=seed), distance, tell)
    plan = Plan(seconds=distance.seconds, seed=seed, frontier=frontier_scenarios, check=course.check, shrink_seconds=0.0)
    recorder = Recorder.create()
    try:
        Worker(plan, (0, 0), course, recorder).fuzz(float("inf"), float("inf"))
    finally:
        recorder.close()
    return course.run


class _Course:
    """Check and supervisor for the campaign's worker: it looks for mutants after each check of the campaign."""

    def __init__(self, run: CampaignRun, distance: Distance, tell: Callable[[CampaignRun], None]) -> None:
        self.run, self._distance, self._tell = run, distance, tell
        self._left: dict[str, Mutant] = {name: mutant(name) for name in distance.mutants}
        self._clock, self._not_counted = WorkClock(), 0.0
        self.stopped = threading.Event()

    def send(self, _message: object) -> None:
        """Ignore counts and findings."""

    def next(self) -> Any:
        """Refuse to shrink."""
        return MayShrink(yes=False)

    def pending(self) -> list[Any]:
        """Order nothing."""
        return []

    def check(self, scenario: Scenario, /, *, alter: Any = None, beyond: bool = False, **options: Any) -> CaseVerdict:
        """Check a scenario, then check it once for each mutant that applies to it and is not caught yet."""
        verdict = oracle_check(scenario, alter=alter, beyond=beyond, **options)
        self._count(checks=self.run.checks + 1)
        if not beyond and verdict.outcome is not Outcome.UNSUPPORTED and not verdict.outcome.is_finding:
            clock = WorkClock()
            caught = [each for each in self._left.values() if _may_show(each, scenario) and _shows(each, scenario, options)]
            self._not_counted += clock.seconds
            catch = Catch(seconds=self.run.seconds, checks=self.run.checks)
            for each in caught:
                del self._left[each.name]
            self._count(catches=(*self.run.catches, *((each.name, catch) for each in caught)))
        self._tell(self.run)
        if not self._left or self.run.seconds >= self._distance.seconds:
            self.stopped.set()
        return verdict

    def _count(self, **changes: Any) -> None:
        self.run = replace(self.run, seconds=self._clock.seconds - self._not_counted, **changes)


def _may_show(each: Mutant, scenario: Scenario) -> bool:
    return scenario.layout.name in each.layouts and each.applies(scenario)


def _shows(each: Mutant, scenario: Scenario, options: dict[str, Any]) -> bool:
    return oracle_check(scenario, alter=each.plant, **options).outcome.is_finding
