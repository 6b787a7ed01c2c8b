"""One campaign as `fuzz` runs it, in which every mutant is looked for in each scenario that is checked.

The campaign draws, chooses and checks what it would without mutants; so one campaign tells of every mutant when it would have
been caught, had it been the one that is in torch. What the search for mutants costs is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equivcheck.campaign.messages import MayShrink
from equivcheck.campaign.plan import Plan, frontier_scenarios, oracle_check
from equivcheck.campaign.recorder import Recorder
from equivcheck.campaign.worker import Worker
from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.quality.selftest.race.result import CampaignRun, Catch, Distance
from equivcheck.quality.selftest.worker import serve
from equivcheck.scenario import Scenario
from equivcheck.worlds.work_clock import WorkClock

Tell = Callable[[CampaignRun], None]
"""Told of a campaign as it goes on."""


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd` until it ends: jobs are seeds."""
    serve(fd, run_campaign, lambda seed: CampaignRun(seed=seed))


def run_campaign(seed: int, distance: Distance, tell: Tell = lambda _run: None) -> CampaignRun:
    """Check until every mutant is caught, or the CPU time is spent."""
    course = _Course(CampaignRun(seed=seed), distance, tell)
    plan = Plan(seconds=distance.seconds, seed=seed, frontier=frontier_scenarios, check=course.check, shrink_seconds=0.0)
    recorder = Recorder.create()
    try:
        Worker(plan, (0, 0), course, recorder).fuzz(float("inf"), float("inf"))
    finally:
        recorder.close()
    return course.run


class _Course:
    """Checks what the campaign chooses, looks for mutants in it, and is what the campaign reports to."""

    def __init__(self, run: CampaignRun, distance: Distance, tell: Tell) -> None:
        self.run, self._distance, self._tell = run, distance, tell
        self._left: dict[str, Mutant] = {name: mutant(name) for name in distance.mutants}
        self._clock, self._not_counted = WorkClock(), 0.0
        self.stopped = threading.Event()

    def send(self, _message: object) -> None:
        """Counts and findings are of no interest here."""

    def next(self) -> Any:
        """What is found without a mutant is not shrunk."""
        return MayShrink(yes=False)

    def pending(self) -> list[Any]:
        """No machine is lost."""
        return []

    def check(self, scenario: Scenario, /, *, alter: Any = None, beyond: bool = False, **options: Any) -> CaseVerdict:
        """The check of the campaign; after it, one for each mutant that may show here and was not caught yet."""
        verdict = oracle_check(scenario, alter=alter, beyond=beyond, **options)
        self._count(checks=self.run.checks + 1)
        if not beyond and verdict.outcome is not Outcome.UNSUPPORTED and not verdict.outcome.is_finding:
            clock = WorkClock()
            caught = [each for each in self._left.values() if _may_show(each, scenario) and _shows(each, scenario, options)]
            self._not_counted += clock.seconds
            self._note(caught)
        self._tell(self.run)
        if not self._left or self.run.seconds >= self._distance.seconds:
            self.stopped.set()
        return verdict

    def _note(self, caught: list[Mutant]) -> None:
        catch = Catch(seconds=self.run.seconds, checks=self.run.checks)
        for each in caught:
            del self._left[each.name]
        self._count(catches=(*self.run.catches, *((each.name, catch) for each in caught)))

    def _count(self, **changes: Any) -> None:
        self.run = replace(self.run, seconds=self._clock.seconds - self._not_counted, **changes)


def _may_show(each: Mutant, scenario: Scenario) -> bool:
    return scenario.layout.name in each.layouts and each.applies(scenario)


def _shows(each: Mutant, scenario: Scenario, options: dict[str, Any]) -> bool:
    return oracle_check(scenario, alter=each.plant, **options).outcome.is_finding
