"""Learning-rate schedules that advance too often, or never."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.mutants.mutant import TWO_STEPS, Minimum, fault
from equivcheck.mutants.needs import EVERYWHERE, updates_exceed_rounding
from equivcheck.mutants.rank import around_update, mesh_of, num_microbatches
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup


def _has_schedule(scenario: Scenario) -> bool:
    return scenario.training.schedule is not None and scenario.training.steps > 1 and updates_exceed_rounding(scenario)


def _has_microbatches(scenario: Scenario) -> bool:
    return _has_schedule(scenario) and len(scenario.training.data.microbatches) > 1


@fault(
    layouts=EVERYWHERE,
    applies=_has_schedule,
    causes=(Cause.SCHEDULE,),
    minimum=Minimum(ranks=2, steps=2, because="with one rank the schedule is right, and so is the first step"),
)
def schedule_stepped_each_rank(setup: Setup) -> None:
    """The schedule advances once per rank in each step."""
    _step_schedule(setup, mesh_of(setup).size())


@fault(layouts=EVERYWHERE, applies=_has_microbatches, causes=(Cause.SCHEDULE,), minimum=TWO_STEPS)
def schedule_stepped_each_microbatch(setup: Setup) -> None:
    """The schedule advances once per microbatch."""
    _step_schedule(setup, num_microbatches(setup))


def _step_schedule(setup: Setup, times: int) -> None:
    """Step the schedule `times` times per update, including the step by the loop."""
    schedules: list[LRScheduler] = []
    setup.before_training.append(lambda _optimizer, schedule: schedules.extend(() if schedule is None else (schedule,)))

    def step(_optimizer: Optimizer) -> None:
        for schedule in schedules * (times - 1):
            schedule.step()

    around_update(setup, after=step)


@fault(layouts=EVERYWHERE, applies=_has_schedule, causes=(Cause.SCHEDULE,), minimum=TWO_STEPS)
def schedule_stuck(setup: Setup) -> None:
    """The schedule never advances."""
    rates: list[float] = []

    def hold(optimizer: Optimizer, _step: int) -> None:
        rates.extend(group["lr"] for group in optimizer.param_groups[len(rates) :])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    setup.before_step.append(hold)
