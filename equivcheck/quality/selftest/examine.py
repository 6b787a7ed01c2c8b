"""One mutant: in how many scenarios it changes anything, in how many it is caught, and what is left of a catch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.batches import EndBatch, FaultShown, batch_seed, run_batch
from equivcheck.campaign.findings.size import settings_of, size_of
from equivcheck.campaign.shrinking.search import Shrinking
from equivcheck.checking.check import check
from equivcheck.diagnosis.explain import explained
from equivcheck.errors import UsageError
from equivcheck.mutants.mutant import Mutant
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.quality.selftest.reach import is_reached
from equivcheck.quality.selftest.row import Row, Shrunk
from equivcheck.scenario import Scenario
from equivcheck.strategies import scenarios
from equivcheck.strategies.scenario import MORE_RESUMES
from equivcheck.worlds.work_clock import WorkClock

Tell = Callable[[Row], None]
"""Told of a row as it grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The budget of one mutant; the first that is used up ends the drawing of scenarios."""

    seed: int = 0
    """With the name of a mutant it decides everything that is drawn; at least 0."""
    examples: int = 200
    """Scenarios drawn at most, 1 to 500."""
    seconds: float = 120.0
    """For drawing and checking, above 0, of work (`WorkClock`); shrinking and explaining come after it."""
    reached_after_catch: int = 5
    """Further scenarios in which the mutant changes something, once one has been caught."""
    shrink_seconds: float = 20.0
    """Limit for shrinking, of work."""
    deadline: float = 10.0
    """Limit for one run of the ranks, in seconds."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"Effort.seed is {self.seed}; allowed: at least 0")
        if not 1 <= self.examples <= 500:
            raise UsageError(f"Effort.examples is {self.examples}; allowed: 1 to 500")
        if not self.seconds > 0:
            raise UsageError(f"Effort.seconds is {self.seconds}; allowed: above 0")


def examine(mutant: Mutant, effort: Effort, tell: Tell = lambda _row: None) -> Row:
    """Draw scenarios of the mutant's layouts, unfiltered, until enough is known of it; then shrink a catch and explain it."""
    drawing = _Drawing(mutant, effort, tell)
    run_batch(_scenarios(mutant), _seed(mutant, effort), drawing.take)
    row = drawing.row
    if drawing.smallest is None:
        return row
    row = replace(row, shrunk=_shrunk(mutant, effort, drawing.smallest))
    tell(row)
    assert row.shrunk is not None
    verdict = check(row.shrunk.scenario, alter=mutant.plant, deadline=effort.deadline)
    told = explained(verdict, alter=mutant.plant)
    return replace(row, given=told.diagnosis, broken=told.unfinished)


def _scenarios(mutant: Mutant) -> SearchStrategy[Scenario]:
    return scenarios(layouts=mutant.layouts, resumes=MORE_RESUMES)


def _seed(mutant: Mutant, effort: Effort) -> int:
    return batch_seed(effort.seed, zlib.crc32(mutant.name.encode()))


class _Drawing:
    """Counts what comes of the scenarios that are drawn."""

    def __init__(self, mutant: Mutant, effort: Effort, tell: Tell) -> None:
        self._mutant, self._effort, self._tell = mutant, effort, tell
        self._clock = WorkClock()
        self._seen: set[Scenario] = set()
        self._reached_after_catch = 0
        self.row = Row.of(mutant)
        self.smallest: Verdict | None = None
        """Of the catches; rather one of which the honest training is equivalent, and steps are not traced, which is slow."""
        self._rank: tuple[int, ...] | None = None

    def take(self, scenario: Scenario) -> None:
        """One scenario that was drawn; raises `EndBatch` after the last."""
        if self._is_enough():
            raise EndBatch
        if scenario in self._seen:
            return
        self._seen.add(scenario)
        self.row = replace(self.row, drawn=self.row.drawn + 1)
        if self._mutant.applies(scenario) and is_reached(scenario, self._mutant, self._effort.deadline):
            self._reached_after_catch += self.row.is_killed
            self.row = replace(self.row, reachable=self.row.reachable + 1)
            self._count(scenario)
        if not self.row.is_killed:
            self.row = replace(self.row, seconds=self._clock.seconds)
        self._tell(self.row)

    def _is_enough(self) -> bool:
        return (
            self.row.drawn >= self._effort.examples
            or self._clock.seconds > self._effort.seconds
            or (self.row.is_killed and self._reached_after_catch >= self._effort.reached_after_catch)
        )

    def _count(self, scenario: Scenario) -> None:
        """Judge a reachable scenario, and count it to its layout."""
        before = self.row
        self._judge(scenario)
        caught, undecided = self.row.caught - before.caught, self.row.undecided - before.undecided
        self.row = self.row.with_scenario(scenario.layout.name, caught=caught, undecided=undecided)

    def _judge(self, scenario: Scenario) -> None:
        honest = check(scenario, deadline=self._effort.deadline)
        verdict = check(scenario, alter=self._mutant.plant, deadline=self._effort.deadline)
        if verdict.outcome.is_finding and not honest.outcome.is_finding:
            self._caught(verdict, is_clear=honest.is_clear)
        elif not honest.is_clear:
            self.row = replace(self.row, undecided=self.row.undecided + 1)
        elif self.row.survivor is None or size_of(scenario) < size_of(self.row.survivor):
            self.row = replace(self.row, survivor=scenario)

    def _caught(self, verdict: Verdict, *, is_clear: bool) -> None:
        if not self.row.is_killed:
            self.row = replace(self.row, examples=self.row.drawn, seconds=self._clock.seconds)
        self.row = replace(self.row, caught=self.row.caught + 1)
        rank = (not is_clear, verdict.scenario.layout.execution.whole_step, *size_of(verdict.scenario))
        if self._rank is None or rank < self._rank:
            self.smallest, self._rank = verdict, rank


@dataclass(slots=True)
class _Judge:
    """Checks scenarios in which a mutant is planted, while they shrink.

    In full, only what is equivalent without the mutant counts: else it might shrink to what nobody could compute.
    """

    mutant: Mutant
    """What is planted."""
    deadline: float
    """Limit for one run of the ranks, in seconds."""
    checks: int = 0
    """How many so far."""

    def __call__(self, scenario: Scenario, *, coarse: bool) -> Verdict:
        if not self.mutant.applies(scenario) or scenario.layout.name not in self.mutant.layouts:
            return Verdict(outcome=Outcome.UNSUPPORTED, scenario=scenario, world="sim", reason="nothing to plant it into")
        self.checks += 1
        verdict = check(scenario, alter=self.mutant.plant, deadline=self.deadline, coarse=coarse)
        if coarse or not verdict.outcome.is_finding:
            return verdict
        honest = check(scenario, deadline=self.deadline)
        return verdict if honest.is_clear else honest


def _shrunk(mutant: Mutant, effort: Effort, first: Verdict) -> Shrunk:
    """The smallest scenario with the same outcome: Hypothesis draws the same ones again, and shrinks the one that was caught."""
    clock, judge = WorkClock(), _Judge(mutant, effort.deadline)
    search = Shrinking(first, judge, same=lambda verdict: verdict.outcome is first.outcome, seconds=effort.shrink_seconds)
    has_begun = False

    def take(scenario: Scenario) -> None:
        nonlocal has_begun
        if search.is_drawn_out:
            raise EndBatch
        has_begun = has_begun or scenario == first.scenario
        if has_begun and search.offer(judge(scenario, coarse=search.coarse)):
            raise FaultShown

    run_batch(_scenarios(mutant), _seed(mutant, effort), take)
    best = search.finish()
    assert isinstance(best, Verdict)
    return Shrunk(
        scenario=best.scenario,
        outcome=best.outcome,
        minimum=mutant.minimum,
        options=settings_of(best.scenario),
        seconds=clock.seconds,
        checks=judge.checks,
    )
