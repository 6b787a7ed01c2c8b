"""Turns between batches with trainings and batches with tensor programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.plan import USUAL_CHECK_SECONDS, Plan
from equivcheck.campaign.sources import Source, sources

PROGRAM_SECONDS = 0.12
"""Mean seconds per check for tensor programs, with the programs drawn for it."""
LEAST_SHARE, MOST_SHARE = 0.1, 0.5
"""Least and most share of the time for tensor programs if there are trainings too."""


class Reached(Protocol):
    """Counts new features."""

    def gain(self, case: Any, /) -> int:
        """How many new features a case would add."""

    def add(self, case: Any, /) -> None:
        """Count a case."""


@dataclass(slots=True, kw_only=True)
class Part:
    """A campaign's checks on one kind of cases."""

    reach: Reached
    """Features reached by its checks."""
    seconds: float
    """Expected seconds per check."""
    num_checks: int = 0
    """How many checks there were."""
    gain: float = 1.0
    """Share of the last batch that brought a new feature pair, or a new operation with placements."""
    checks_of_batch: int = 0
    """Checks in the current batch."""
    new_of_batch: int = 0
    """Checks in the current batch that brought something new."""

    @property
    def spent(self) -> float:
        """Expected seconds for its checks so far."""
        return self.num_checks * self.seconds

    def count(self, case: Any) -> None:
        """Count a check."""
        self.num_checks, self.checks_of_batch = self.num_checks + 1, self.checks_of_batch + 1
        self.new_of_batch += self.reach.gain(case) > 0
        self.reach.add(case)

    def end_batch(self) -> None:
        """Compute `gain` from the batch that ends."""
        if self.checks_of_batch:
            self.gain, self.checks_of_batch, self.new_of_batch = self.new_of_batch / self.checks_of_batch, 0, 0


class Turns:
    """Alternates between trainings and tensor programs.

    10 to 50 % of the time goes to tensor programs: their gain per second (`Part.gain`), relative to trainings. Time is the
    checks' expected duration and not a clock, so the seed decides what is drawn.
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
        """End the current batch and return the source of the next."""
        self.parts[self.is_of_programs].end_batch()
        self.is_of_programs = self._trainings is None or (self._programs is not None and self._owes_programs())
        if self._trainings is not None and not self.is_of_programs:
            return next(self._trainings)
        assert self._programs is not None
        return self._programs

    def count(self, case: Any) -> None:
        """Count a check in the current batch."""
        self.parts[self.is_of_programs].count(case)

    def _owes_programs(self) -> bool:
        """Whether tensor programs have had less than their share of the time."""
        gains = {each: part.gain / part.seconds for each, part in self.parts.items()}
        share = min(MOST_SHARE, max(LEAST_SHARE, gains[True] / (sum(gains.values()) or 1.0)))
        return self.parts[True].spent < share * sum(part.spent for part in self.parts.values())
