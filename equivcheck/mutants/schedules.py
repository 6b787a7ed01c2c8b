"""A learning-rate schedule that advances too often, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.places import EVERYWHERE, updates_tell
from equivcheck.scenario import Scenario
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from equivcheck.train.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStepped:
    """Steps the schedule several times a step."""

    times: Callable[[Setup], int]
    """How often; importable by its name."""

    def __call__(self, setup: Setup) -> None:
        """Step it after each update, in addition to the loop."""
        schedules: list[LRScheduler] = []
        setup.before_training.append(lambda _optimizer, schedule: schedules.extend(() if schedule is None else (schedule,)))
        update, more = setup.update, self.times(setup) - 1

        def update_and_step(optimizer: Optimizer) -> None:
            update(optimizer)
            for schedule in schedules * more:
                schedule.step()

        setup.update = update_and_step


def once_a_rank(setup: Setup) -> int:
    """As often as there are ranks."""
    assert setup.mesh is not None, "a mutant is planted into a rank"
    return setup.mesh.size()


def once_a_microbatch(setup: Setup) -> int:
    """As often as there are microbatches in a step."""
    return len(setup.training.data.microbatches)


def hold_rates(setup: Setup) -> None:
    """Set learning rates back before each step to what they were before the first."""
    rates: list[float] = []

    def hold(optimizer: Optimizer, _step: int) -> None:
        rates.extend(group["lr"] for group in optimizer.param_groups[len(rates) :])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    setup.before_step.append(hold)


def _has_schedule(scenario: Scenario) -> bool:
    return scenario.training.schedule is not None and scenario.training.steps > 1 and updates_tell(scenario)


def _has_microbatches(scenario: Scenario) -> bool:
    return _has_schedule(scenario) and len(scenario.training.data.microbatches) > 1


_SECOND_STEP = "the first step has the first rate in any case"

SCHEDULES: tuple[Mutant, ...] = (
    Mutant(
        name="schedule_stepped_each_rank",
        wrong="The schedule advances as often a step as there are ranks.",
        family=Family.OPTIMIZER,
        layouts=EVERYWHERE,
        applies=_has_schedule,
        plant=ScheduleStepped(times=once_a_rank),
        causes=(Cause.SCHEDULE,),
        minimum=Minimum(ranks=2, steps=2, because=f"one rank advances it once; {_SECOND_STEP}"),
    ),
    Mutant(
        name="schedule_stepped_each_microbatch",
        wrong="The schedule advances at each microbatch.",
        family=Family.OPTIMIZER,
        layouts=EVERYWHERE,
        applies=_has_microbatches,
        plant=ScheduleStepped(times=once_a_microbatch),
        causes=(Cause.SCHEDULE,),
        minimum=Minimum(ranks=1, steps=2, because=_SECOND_STEP),
    ),
    Mutant(
        name="schedule_stuck",
        wrong="The schedule never advances.",
        family=Family.OPTIMIZER,
        layouts=EVERYWHERE,
        applies=_has_schedule,
        plant=hold_rates,
        causes=(Cause.SCHEDULE,),
        minimum=Minimum(ranks=1, steps=2, because=_SECOND_STEP),
    ),
)
"""Every such mutant."""
