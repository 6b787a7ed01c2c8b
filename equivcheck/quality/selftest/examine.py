"""Examine one mutant: the number of scenarios in which it has an effect and is caught, and the smallest catch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.batches import EndBatch, FaultShown, batch_seed, run_batch
from equivcheck.campaign.findings.size import settings_of, size_of
from equivcheck.campaign.shrinking.search import Shrinking
from equivcheck.checking.check import check
from equivcheck.diagnosis.explain import explained
from equivcheck.errors import UsageError
from equivcheck.layouts.composition.running import RanksResult, Runner
from equivcheck.mutants.mutant import Mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.quality.selftest.result import MutantResult, ShrunkScenario
from equivcheck.scenario import Scenario
from equivcheck.strategies import scenarios
from equivcheck.strategies.scenario import MORE_RESUMES
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.trace import Trace
from equivcheck.worlds.work_clock import WorkClock

Tell = Callable[[MutantResult], None]
"""Function that gets a mutant's result each time the result has grown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Budget for one mutant. Drawing ends when the first limit is reached. Raises `UsageError` for an invalid field."""

    seed: int = 0
    """Seed, at least 0. With the mutant's name, it determines all random draws."""
    examples: int = 200
    """Maximum number of scenarios to draw, 1 to 500."""
    seconds: float = 120.0
    """Seconds of work (`WorkClock`) for drawing and checking, above 0. Shrinking and the diagnosis take additional time."""
    reached_after_catch: int = 5
    """After the first catch, draw until the mutant has an effect in this many more scenarios."""
    shrink_seconds: float = 20.0
    """Maximum seconds of work for shrinking."""
    deadline: float = 10.0
    """Maximum seconds for one run of the ranks."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"Effort.seed {self.seed} is not valid: too low. Expected at least 0")
        if not 1 <= self.examples <= 500:
            raise UsageError(f"Effort.examples {self.examples} is not valid: out of range. Expected 1 to 500")
        if not self.seconds > 0:
            raise UsageError(f"Effort.seconds {self.seconds} is not valid: too low. Expected a number above 0")


def examine(mutant: Mutant, effort: Effort, tell: Tell = lambda _row: None) -> MutantResult:
    """Draw scenarios with a mutant within the budget `effort`. Then shrink one in which it was caught, and diagnose it.

    If possible, the shrunk scenario is small, and equivalent without the mutant. `tell` is called with the result so far after
    each drawn scenario and after shrinking.
    """
    drawing = _Drawing(mutant, effort, tell)
    run_batch(_scenarios(mutant), _seed(mutant, effort), drawing.take)
    row = drawing.row
    if drawing.smallest is None:
        return row
    row = replace(row, shrunk=_shrunk(mutant, effort, drawing.smallest))
    tell(row)
    assert row.shrunk is not None
    verdict = check(row.shrunk.scenario, alter=mutant.plant, deadline=effort.deadline)
    examined = explained(verdict, alter=mutant.plant)
    return replace(row, given=examined.diagnosis, broken=examined.unfinished)


def _scenarios(mutant: Mutant) -> SearchStrategy[Scenario]:
    return scenarios(layouts=mutant.layouts, resumes=MORE_RESUMES)


def _seed(mutant: Mutant, effort: Effort) -> int:
    return batch_seed(effort.seed, zlib.crc32(mutant.name.encode()))


class _Drawing:
    """Counts the results for drawn scenarios."""

    def __init__(self, mutant: Mutant, effort: Effort, tell: Tell) -> None:
        self._mutant, self._effort, self._tell = mutant, effort, tell
        self._clock = WorkClock()
        self._seen: set[Scenario] = set()
        self._reached_after_catch = 0
        self.row = MutantResult.of(mutant)
        self.smallest: Verdict | None = None
        """Best catch to shrink: if possible, one that is equivalent without the mutant, and not traced, because tracing is slow.
        """
        self._rank: tuple[int, ...] | None = None

    def take(self, scenario: Scenario) -> None:
        """Count one drawn scenario. Raises `EndBatch` after the last scenario."""
        if self._is_enough():
            raise EndBatch
        if scenario in self._seen:
            return
        self._seen.add(scenario)
        self.row = replace(self.row, drawn=self.row.drawn + 1)
        if self._mutant.applies(scenario) and has_effect(scenario, self._mutant, self._effort.deadline):
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
        """Judge a scenario in which the mutant has an effect."""
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
    """Checks scenarios with a planted mutant while they shrink.

    A full check also requires the scenario to be equivalent without the mutant. Otherwise shrinking could end at a scenario that
    is wrong by itself.
    """

    mutant: Mutant
    """Mutant to plant."""
    deadline: float
    """Limit for one run of the ranks, in seconds."""
    checks: int = 0
    """Checks so far."""

    def __call__(self, scenario: Scenario, *, coarse: bool) -> Verdict:
        if not self.mutant.applies(scenario) or scenario.layout.name not in self.mutant.layouts:
            return Verdict(outcome=Outcome.UNSUPPORTED, scenario=scenario, world="sim", reason="the mutant does not apply")
        self.checks += 1
        verdict = check(scenario, alter=self.mutant.plant, deadline=self.deadline, coarse=coarse)
        if coarse or not verdict.outcome.is_finding:
            return verdict
        honest = check(scenario, deadline=self.deadline)
        return verdict if honest.is_clear else honest


def _shrunk(mutant: Mutant, effort: Effort, first: Verdict) -> ShrunkScenario:
    """Find the smallest scenario with the same outcome.

    Hypothesis draws the same scenarios again, and shrinks the caught scenario.
    """
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
    return ShrunkScenario(
        scenario=best.scenario,
        outcome=best.outcome,
        minimum=mutant.minimum,
        options=settings_of(best.scenario),
        seconds=clock.seconds,
        checks=judge.checks,
    )


def has_effect(scenario: Scenario, mutant: Mutant, deadline: float) -> bool:
    """Whether the mutant has an effect on a scenario: it changes a bit in a rank's trace, or ranks fail only with the mutant.

    If the mutant changes only communication, changed collective calls count too.
    """
    try:
        honest = Runner(world="sim", deadline=deadline).run(scenario)
    except RanksFailed:
        return False
    try:
        wrong = Runner(world="sim", deadline=deadline, alter=mutant.plant).run(scenario)
    except RanksFailed:
        return True
    if Cause.COMMUNICATION in mutant.causes and honest.run.calls != wrong.run.calls:
        return True
    return not _alike(_traces(honest), _traces(wrong))


def _traces(result: RanksResult) -> tuple[Trace, ...]:
    return (*result.before, *result.run.values)


def _alike(first: Sequence[Trace], second: Sequence[Trace]) -> bool:
    left, right = _moments(first), _moments(second)
    return len(left) == len(right) and all(map(_same_bits, left, right))


def _moments(traces: Sequence[Trace]) -> list[Moment]:
    return [moment for trace in traces for moment in moments(trace)]


def _same_bits(one: Moment, other: Moment) -> bool:
    first, second = one.snapshot, other.snapshot
    shapes = (first.pieces, first.present, first.fits, first.dtypes) == (
        second.pieces,
        second.present,
        second.fits,
        second.dtypes,
    )
    return shapes and first.values.tobytes() == second.values.tobytes()
