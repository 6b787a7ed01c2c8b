"""Which batches of a worker are of trainings, and which of tensor programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.plan import USUAL_CHECK_SECONDS, Plan
from equivcheck.campaign.sources import Source, sources

PROGRAM_SECONDS = 0.12
"""What a check of a tensor program takes on average, with all that is drawn for it."""
LEAST_SHARE, MOST_SHARE = 0.1, 0.5
"""Of the time, for tensor programs beside trainings."""


class Reached(Protocol):
    """Counts what is new."""

    def gain(self, case: Any, /) -> int:
        """How much of it a case would bring."""

    def add(self, case: Any, /) -> None:
        """Count a case."""


@dataclass(slots=True, kw_only=True)
class Part:
    """What a campaign has had of one kind of cases."""

    reach: Reached
    """What its checks have brought."""
    seconds: float
    """What one of them is expected to take."""
    num_checks: int = 0
    """How many there were."""
    gain: float = 1.0
    """What part of those of its last batch brought a pair of features, or an operation with placements, not met before."""
    checks_of_batch: int = 0
    """Those of the batch that goes on."""
    new_of_batch: int = 0
    """Those of them that brought such."""

    @property
    def spent(self) -> float:
        """Seconds that its checks were expected to take."""
        return self.num_checks * self.seconds

    def count(self, case: Any) -> None:
        """Count a check."""
        self.num_checks, self.checks_of_batch = self.num_checks + 1, self.checks_of_batch + 1
        self.new_of_batch += self.reach.gain(case) > 0
        self.reach.add(case)

    def end_batch(self) -> None:
        """What a batch gained counts for what comes next."""
        if self.checks_of_batch:
            self.gain, self.checks_of_batch, self.new_of_batch = self.new_of_batch / self.checks_of_batch, 0, 0


class Turns:
    """Trainings and tensor programs in turns, so that a seed decides what is drawn: time is what checks are expected to take.

    Tensor programs have the share of it that they gain: what part of those in their last batch brought something new
    (`Part.gain`), for what a check costs, beside the same of trainings; but never less than a tenth, nor more than a half.
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
        """What the next batch is drawn from; the one before is over."""
        self.parts[self.is_of_programs].end_batch()
        self.is_of_programs = self._trainings is None or (self._programs is not None and self._owes_programs())
        if self._trainings is not None and not self.is_of_programs:
            return next(self._trainings)
        assert self._programs is not None
        return self._programs

    def count(self, case: Any) -> None:
        """Count a check of the batch that goes on."""
        self.parts[self.is_of_programs].count(case)

    def _owes_programs(self) -> bool:
        """Whether tensor programs have had less than their share of the time."""
        gains = {each: part.gain / part.seconds for each, part in self.parts.items()}
        share = min(MOST_SHARE, max(LEAST_SHARE, gains[True] / (sum(gains.values()) or 1.0)))
        return self.parts[True].spent < share * sum(part.spent for part in self.parts.values())
