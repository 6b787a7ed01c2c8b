"""The control of a campaign: a training that is wrong on purpose, which the check must find, else its silence means nothing."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.campaign.messages import Control
from equivcheck.campaign.plan import Alter, Plan
from equivcheck.scenario import Scenario
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.verdict.verdict import Verdict
from equivcheck.worlds.work_clock import WorkClock

if TYPE_CHECKING:
    from equivcheck.mutants.mutant import Mutant

MAX_DRAWN = 500
"""Scenarios after which a control that was not caught has survived, or cannot be reached."""
_CHUNK = 100
"""Scenarios drawn at once."""
_SHARE = 0.1
"""Part of a worker's work that a control may take before the end."""
_USUAL_RANKS = 4
"""Most ranks of its scenarios, unless it takes more."""

Checked = Callable[[Scenario, Alter], Verdict]
"""Checks a scenario with a fault in it."""


def control_of(plan: Plan) -> ControlRun | None:
    """The control that a plan's seed draws; None where it has none, or none can be planted in its layouts."""
    candidates = plan.controls(plan) if plan.controls is not None else ()
    return ControlRun(plan, candidates[plan.seed % len(candidates)]) if candidates else None


def applicable_mutants(plan: Plan) -> tuple[Mutant, ...]:
    """The mutants that can be planted in a plan's layouts; if there are any, those that show most simply in one of them."""
    from equivcheck.composition.registry import layout_names
    from equivcheck.mutants.mutant import Family
    from equivcheck.mutants.registry import mutants_of

    names = plan.layouts or layout_names()
    found = [mutant for mutant in mutants_of(names) if mutant.minimum.ranks <= plan.max_ranks]
    if plan.world != "sim":
        # There a hang lasts until the deadline.
        found = [each for each in found if each.family is not Family.RUNTIME]
    return tuple([each for each in found if each.layouts[0] in names] or found)


class ControlRun:
    """Checks scenarios with one mutant in them until one is caught."""

    def __init__(self, plan: Plan, mutant: Mutant) -> None:
        self._plan, self._mutant = plan, mutant
        self._waiting: deque[Scenario] = deque()
        self._drawn = 0
        self._control = Control(name=mutant.name, wrong=mutant.wrong)
        self.draw()

    @property
    def is_over(self) -> bool:
        """Whether it was caught, or nothing is left to draw."""
        return self._control.caught or (self._drawn >= MAX_DRAWN and not self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether there is a scenario for `step`."""
        return bool(self._waiting)

    @property
    def result(self) -> Control:
        """What came of it so far."""
        return self._control

    def is_due(self, seconds: float) -> bool:
        """Whether it may take some time now, after so many seconds of work."""
        return self.has_waiting and not self._control.caught and self._control.seconds <= seconds * _SHARE

    def draw(self) -> None:
        """Draw some more scenarios if none is waiting; not from within a batch."""
        if self._waiting or self.is_over:
            return
        names = [name for name in self._mutant.layouts if not self._plan.layouts or name in self._plan.layouts]
        most = min(self._plan.max_ranks, max(_USUAL_RANKS, self._mutant.minimum.ranks), MAX_RANKS)
        seed = batch_seed(self._plan.seed, zlib.crc32(self._mutant.name.encode()), self._drawn)
        self._waiting.extend(filter(self._mutant.applies, _drawn(tuple(names), most, seed)))
        self._drawn += _CHUNK

    def step(self, check: Checked) -> None:
        """Check the next scenario."""
        clock = WorkClock()
        verdict = check(self._waiting.popleft(), self._mutant.plant)
        self._control = Control(
            name=self._control.name,
            wrong=self._control.wrong,
            examples=self._control.examples + 1,
            seconds=self._control.seconds + clock.seconds,
            caught=verdict.outcome.is_finding,
        )


def _drawn(names: tuple[str, ...], max_ranks: int, seed: int) -> list[Scenario]:
    from equivcheck.strategies import scenarios
    from equivcheck.strategies.scenario import MORE_RESUMES

    found: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if len(found) >= _CHUNK:
            raise EndBatch
        if scenario not in found:  # the plainest comes again and again
            found.append(scenario)

    run_batch(scenarios(layouts=names, max_ranks=max_ranks, resumes=MORE_RESUMES), seed, take)
    return found
