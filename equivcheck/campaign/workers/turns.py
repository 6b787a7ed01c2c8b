"""Decides about each batch: trainings or tensor programs, and the layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from random import Random
from typing import Any, Protocol

from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.plan import USUAL_CHECK_SECONDS, Plan
from equivcheck.layouts.composition.registry import layout_names

_CYCLE = 10
"""Batches after which the cycle repeats."""
_BEYOND = frozenset((2,))
"""Positions in a cycle, from 0, at which batches ignore torch's limits.
One position is early because a short run has few batches, but it comes after half a minute with supported scenarios."""
_FOCUSED = frozenset((3, 5, 8))
"""Positions in a cycle at which batches draw from one layout. If all layouts are drawn together, four features of one layout
rarely meet."""
_STAY = 10
"""Consecutive focused batches with one layout: some hundreds of checks, as many as a short campaign with only that layout has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A strategy for a batch of cases, with options for checking them."""

    strategy: SearchStrategy[Any]
    """Strategy for the cases."""
    beyond: bool = False
    """Whether the cases are checked beyond torch's limits."""
    focus: str = ""
    """Name of the only layout in the batch; empty for all layouts."""


def sources(plan: Plan, worker: int) -> Iterator[Source]:
    """Yield a source for each batch of trainings on one worker, without end.

    Some sources have one layout only. Workers begin with different layouts.
    """
    assert plan.strategy is not None
    usual = plan.strategy(plan)
    beyond = usual if plan.frontier is None else plan.frontier(plan)
    focused = _focused(plan, worker)
    for number in count():
        place = number % _CYCLE
        if place in _BEYOND and plan.frontier is not None:
            yield Source(strategy=beyond, beyond=True)
        elif place in _FOCUSED and focused is not None:
            yield next(focused)
        else:
            yield Source(strategy=usual)


def _focused(plan: Plan, worker: int) -> Iterator[Source] | None:
    """Cycle through the layouts in an order decided by the seed; None if there is only one layout."""
    names = list(plan.layouts or layout_names())
    if len(names) == 1:
        return None
    Random(plan.seed).shuffle(names)
    first = worker * len(names) // plan.num_workers % len(names)
    return cycle([source for name in (*names[first:], *names[:first]) for source in [_source(plan, name)] * _STAY])


def _source(plan: Plan, name: str) -> Source:
    assert plan.strategy is not None
    return Source(strategy=plan.strategy(replace(plan, layouts=(name,))), focus=name)


PROGRAM_SECONDS = 0.12
"""Mean seconds per check for tensor programs, including the drawing of programs for it."""
LEAST_SHARE, MOST_SHARE = 0.1, 0.5
"""Minimum and maximum share of the time for tensor programs if there are trainings too."""


class Reached(Protocol):
    """Protocol for an object that counts the features in checked cases, such as `Reach`."""

    def gain(self, case: Any, /) -> int:
        """Return how many new features a case would add."""

    def add(self, case: Any, /) -> None:
        """Count a case's features."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Progress in one kind of case: trainings or tensor programs."""

    reach: Reached
    """Features in the checked cases."""
    seconds: float
    """Expected seconds for one check."""
    num_checks: int = 0
    """How many checks ran."""
    gain: float = 1.0
    """Share of the last batch's cases with a new feature: a feature pair, or an operation with new placements."""
    checks_of_batch: int = 0
    """How many checks ran in the current batch."""
    new_of_batch: int = 0
    """How many of these checks had a new feature."""

    @property
    def expected_seconds(self) -> float:
        """Expected duration, in seconds, of all checks of this kind that have run."""
        return self.num_checks * self.seconds

    def count(self, case: Any) -> None:
        """Count a check and its case's features."""
        self.num_checks, self.checks_of_batch = self.num_checks + 1, self.checks_of_batch + 1
        self.new_of_batch += self.reach.gain(case) > 0
        self.reach.add(case)

    def end_batch(self) -> None:
        """End the current batch, and set `gain` to the batch's share of cases with a new feature."""
        if self.checks_of_batch:
            self.gain, self.checks_of_batch, self.new_of_batch = self.new_of_batch / self.checks_of_batch, 0, 0


class Turns:
    """Alternates between trainings and tensor programs.

    10 to 50 % of the time goes to tensor programs, depending on how many new features they bring per second (`Part.gain`)
    relative to trainings. Time is the checks' expected duration and not a clock, so the same seed gives the same cases.
    """

    def __init__(self, plan: Plan, worker: int) -> None:
        self._trainings = None if plan.strategy is None else sources(plan, worker)
        self._programs = None if plan.programs is None else Source(strategy=plan.programs(plan))
        self.parts = {
            False: Part(reach=Reach(), seconds=USUAL_CHECK_SECONDS),
            True: Part(reach=ProgramReach(), seconds=PROGRAM_SECONDS),
        }
        self.is_of_programs = self._trainings is None

    def next(self) -> Source:
        """End the current batch, and return the source for the next batch."""
        self.parts[self.is_of_programs].end_batch()
        self.is_of_programs = self._trainings is None or (self._programs is not None and self._owes_programs())
        if self._trainings is not None and not self.is_of_programs:
            return next(self._trainings)
        assert self._programs is not None
        return self._programs

    def count(self, case: Any) -> None:
        """Count a check of this case in the current batch."""
        self.parts[self.is_of_programs].count(case)

    def _owes_programs(self) -> bool:
        """Whether tensor programs have had less than their share of the time."""
        gains = {each: part.gain / part.seconds for each, part in self.parts.items()}
        share = min(MOST_SHARE, max(LEAST_SHARE, gains[True] / (sum(gains.values()) or 1.0)))
        return self.parts[True].expected_seconds < share * sum(part.expected_seconds for part in self.parts.values())
