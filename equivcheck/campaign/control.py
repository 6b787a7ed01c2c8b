"""The control of a campaign: a fault planted on purpose, which the check must catch, else its silence means nothing."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from hypothesis.strategies import SearchStrategy

from equivcheck.campaign.batches import EndBatch, batch_seed, run_batch
from equivcheck.campaign.messages import Control
from equivcheck.campaign.plan import Fault, Plan, generated_programs
from equivcheck.mutants.mutant import Family, Mutant
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Case
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.worlds.work_clock import WorkClock

if TYPE_CHECKING:
    from equivcheck.programs.run.rank import DTensorTarget

MAX_DRAWN = 500
"""Cases after which a control that was not caught has survived, or cannot be reached."""
_CHUNK = 100
"""Cases drawn at once."""
_SHARE = 0.1
"""Part of a worker's work that a control may take before the end."""
_PATIENCE_SHARE, _LEAST_PATIENCE = 0.08, 2.0
"""Part of a campaign's time, and seconds, after which a fault that generated cases have not shown gives way to the next."""
_USUAL_RANKS = 4
"""Most ranks of its scenarios, unless it takes more."""

Checked = Callable[[Case, Any], CaseVerdict]
"""Checks a case with a fault in it."""


def control_of(plan: Plan) -> ControlRun | None:
    """The control that a plan's seed draws; None where it has none, or none can be planted in its layouts."""
    candidates = plan.controls(plan) if plan.controls is not None else ()
    if not candidates:
        return None
    first = plan.seed % len(candidates)
    return ControlRun(plan, (*candidates[first:], *candidates[:first]))


def applicable_mutants(plan: Plan) -> tuple[Mutant, ...]:
    """The mutants that can be planted in a plan's layouts; if there are any, those that show most simply in one of them."""
    from equivcheck.layouts.composition.registry import layout_names
    from equivcheck.mutants.registry import mutants_of

    names = plan.layouts or layout_names()
    found = [mutant for mutant in mutants_of(names) if mutant.minimum.ranks <= plan.max_ranks]
    if plan.world != "sim":
        # There a hang lasts until the deadline.
        found = [each for each in found if each.family is not Family.RUNTIME]
    return tuple([each for each in found if each.layouts[0] in names] or found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFault:
    """A fault in what ranks do of a tensor program."""

    name: str
    """Its name in `equivcheck.programs.run.faults`."""
    wrong: str
    """What is wrong, in one sentence."""
    plant: type[DTensorTarget]
    """What does statements on ranks."""
    applies: Callable[[Any], bool] = lambda _program: True
    """Any program may show it."""


def program_faults(plan: Plan) -> tuple[ProgramFault, ...]:  # noqa: ARG001
    """All of them."""
    from equivcheck.programs.run.faults import FAULTS

    return tuple(ProgramFault(name=name, wrong=str(getdoc(target)), plant=target) for name, target in FAULTS.items())


def applicable_faults(plan: Plan) -> tuple[Fault, ...]:
    """What can be planted in the kinds of cases that a plan has: mutants in trainings, faults in tensor programs."""
    mutants = () if plan.strategy is None else applicable_mutants(plan)
    return (*mutants, *(() if plan.programs is None else program_faults(plan)))


class ControlRun:
    """Plants a fault in one case after the other until it is caught.

    Some faults show in few cases. In a campaign that ends by its time, a fault that has had its part of it gives way to the next,
    so that a short campaign ends with a control that was caught, unless the check is blind.
    """

    def __init__(self, plan: Plan, faults: Sequence[Fault]) -> None:
        self._plan, self._faults = plan, deque(faults)
        self._patience = math.inf if plan.seconds == math.inf else max(_LEAST_PATIENCE, _PATIENCE_SHARE * plan.seconds)
        self._seconds_before = 0.0
        self._plant_next(())
        self.draw()

    def _plant_next(self, passed_over: tuple[str, ...]) -> None:
        self._fault = self._faults.popleft()
        self._waiting: deque[Case] = deque()
        self._drawn = 0
        self._control = Control(name=self._fault.name, wrong=self._fault.wrong, passed_over=passed_over)

    @property
    def is_over(self) -> bool:
        """Whether it was caught, or nothing is left to draw."""
        return self._control.caught or (self._drawn >= MAX_DRAWN and not self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether there is a case for `step`."""
        return bool(self._waiting)

    @property
    def result(self) -> Control:
        """What came of it so far."""
        return self._control

    def is_due(self, seconds: float, *, is_late: bool = False) -> bool:
        """Whether it may take some time now, after so many seconds of work; late in a campaign it always may."""
        has_time = is_late or self._seconds_before + self._control.seconds <= seconds * _SHARE
        return self.has_waiting and not self._control.caught and has_time

    def draw(self) -> None:
        """Draw some more cases if none is waiting; not from within a batch."""
        if self._waiting or self.is_over:
            return
        seed = batch_seed(self._plan.seed, zlib.crc32(self._fault.name.encode()), self._drawn)
        self._waiting.extend(filter(self._fault.applies, _drawn(cases_for(self._fault, self._plan), seed)))
        self._drawn += _CHUNK

    def step(self, check: Checked) -> None:
        """Check the next case."""
        clock = WorkClock()
        verdict = check(self._waiting.popleft(), self._fault.plant)
        self._control = replace(
            self._control,
            examples=self._control.examples + 1,
            seconds=self._control.seconds + clock.seconds,
            caught=verdict.outcome.is_finding,
        )
        if self._control.seconds >= self._patience and not self._control.caught and self._faults:
            self._seconds_before += self._control.seconds
            self._plant_next((*self._control.passed_over, self._control.name))


@singledispatch
def cases_for(fault: Fault, plan: Plan) -> SearchStrategy[Any]:  # noqa: ARG001
    """What a fault is planted in."""
    raise TypeError(f"{type(fault).__name__} is no fault")


@cases_for.register
def _(fault: Mutant, plan: Plan) -> SearchStrategy[Any]:
    from equivcheck.strategies import scenarios
    from equivcheck.strategies.scenario import MORE_RESUMES

    names = tuple(name for name in fault.layouts if not plan.layouts or name in plan.layouts)
    most = min(plan.max_ranks, max(_USUAL_RANKS, fault.minimum.ranks), MAX_RANKS)
    return scenarios(layouts=names, max_ranks=most, resumes=MORE_RESUMES)


@cases_for.register
def _(fault: ProgramFault, plan: Plan) -> SearchStrategy[Any]:
    assert plan.programs is not None
    if fault.plant.planted_in and plan.programs is generated_programs:
        return generated_programs(plan, operations=fault.plant.planted_in)
    return plan.programs(plan)


def _drawn(strategy: SearchStrategy[Any], seed: int) -> list[Case]:
    found: list[Case] = []

    def take(case: Case) -> None:
        if len(found) >= _CHUNK:
            raise EndBatch
        if case not in found:  # the plainest comes again and again
            found.append(case)

    run_batch(strategy, seed, take)
    return found
