"""Controls: bugs that a campaign plants on purpose.

If the check does not catch one, a campaign without findings proves nothing.
"""

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
from equivcheck.campaign.plan import Fault, Plan, generated_programs
from equivcheck.campaign.workers.messages import Control
from equivcheck.mutants.mutant import Family, Mutant, mistake_in
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Checkable
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.worlds.work_clock import WorkClock

if TYPE_CHECKING:
    from equivcheck.programs.run.rank import DTensorTarget

MAX_DRAWN = 500
"""Maximum cases to draw. After them, a fault counts as not caught or not reachable."""
_CHUNK = 100
"""Cases drawn at once."""
_SHARE = 0.1
"""Largest share of a worker's work that the control may take before the campaign ends."""
_PATIENCE_SHARE, _LEAST_PATIENCE = 0.08, 2.0
"""Share of the campaign's time, and minimum seconds. After them, a fault that no case has shown is replaced by the next fault."""
_USUAL_RANKS = 4
"""Maximum ranks in a control's scenarios, unless the fault needs more."""

CheckWithFault = Callable[[Checkable, Any], CaseVerdict]
"""Check function for a case with a planted fault."""


def choose_control(plan: Plan) -> ControlRun | None:
    """Choose the bug to plant on purpose (the control), by the plan's seed.

    Returns None if the plan has no controls, or if no control applies to its layouts.
    """
    candidates = plan.controls(plan) if plan.controls is not None else ()
    if not candidates:
        return None
    first = plan.seed % len(candidates)
    return ControlRun(plan, (*candidates[first:], *candidates[:first]))


def applicable_mutants(plan: Plan) -> tuple[Mutant, ...]:
    """Return mutants to plant in the plan's layouts.

    Each mutant lists the layouts in which it can be planted. Mutants with their first, simplest layout in the plan are preferred:
    the others are returned only if there is none.
    """
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
    """A planted bug in the code that runs tensor programs on ranks."""

    name: str
    """Name of the bug in `equivcheck.programs.run.faults`."""
    wrong: str
    """The mistake, in one sentence."""
    plant: type[DTensorTarget]
    """Class that runs a program's statements on ranks, with the bug in it."""
    applies: Callable[[Any], bool] = lambda _program: True
    """Function that says whether the bug can show in a program. It returns True for all programs."""


def program_faults(plan: Plan) -> tuple[ProgramFault, ...]:  # noqa: ARG001
    """All bugs that can be planted in the code for tensor programs."""
    from equivcheck.programs.run.faults import FAULTS

    return tuple(ProgramFault(name=name, wrong=mistake_in(str(getdoc(target))), plant=target) for name, target in FAULTS.items())


def applicable_faults(plan: Plan) -> tuple[Fault, ...]:
    """Bugs that the campaign can plant.

    A campaign on trainings plants a `Mutant`, and a campaign on tensor programs plants a `ProgramFault`.
    """
    mutants = () if plan.strategy is None else applicable_mutants(plan)
    return (*mutants, *(() if plan.programs is None else program_faults(plan)))


class ControlRun:
    """Plants a bug in one case after another until a check catches it.

    Some bugs change the results of few cases. If the campaign has a time limit and a bug is not caught soon, the next bug is
    planted instead. So even a short campaign ends with a caught bug, unless the check misses all bugs.
    """

    def __init__(self, plan: Plan, faults: Sequence[Fault]) -> None:
        self._plan, self._faults = plan, deque(faults)
        self._patience = math.inf if plan.seconds == math.inf else max(_LEAST_PATIENCE, _PATIENCE_SHARE * plan.seconds)
        self._seconds_before = 0.0
        self._plant_next(())
        self.draw()

    def _plant_next(self, passed_over: tuple[str, ...]) -> None:
        self._fault = self._faults.popleft()
        self._waiting: deque[Checkable] = deque()
        self._drawn = 0
        self._control = Control(name=self._fault.name, wrong=self._fault.wrong, passed_over=passed_over)

    @property
    def is_over(self) -> bool:
        """Whether a check caught the bug, or no more cases can be drawn."""
        return self._control.caught or (self._drawn >= MAX_DRAWN and not self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether a drawn case waits for its check by `step`."""
        return bool(self._waiting)

    @property
    def result(self) -> Control:
        """Result so far: the bug, the checked cases, and whether a check caught it."""
        return self._control

    def is_due(self, seconds: float, *, is_late: bool = False) -> bool:
        """Whether `step` should run now, after `seconds` of work in the campaign.

        Steps get at most 10 % of this time. At the campaign's end (`is_late`), this limit does not apply.
        """
        has_time = is_late or self._seconds_before + self._control.seconds <= seconds * _SHARE
        return self.has_waiting and not self._control.caught and has_time

    def draw(self) -> None:
        """Draw more cases if no case is waiting. Must be called between batches, because Hypothesis runs do not nest."""
        if self._waiting or self.is_over:
            return
        seed = batch_seed(self._plan.seed, zlib.crc32(self._fault.name.encode()), self._drawn)
        self._waiting.extend(filter(self._fault.applies, _drawn(cases_for(self._fault, self._plan), seed)))
        self._drawn += _CHUNK

    def step(self, check: CheckWithFault) -> None:
        """Check the next drawn case with the planted bug, by calling `check`."""
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
    """Return a strategy for cases in which this bug can be planted."""
    raise TypeError(f"fault is not valid: its class is {type(fault).__name__}. Expected Mutant or ProgramFault")


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


def _drawn(strategy: SearchStrategy[Any], seed: int) -> list[Checkable]:
    found: list[Checkable] = []

    def take(case: Checkable) -> None:
        if len(found) >= _CHUNK:
            raise EndBatch
        if case not in found:  # the plainest comes again and again
            found.append(case)

    run_batch(strategy, seed, take)
    return found
