"""Wrong learning-rate schedules, step counts and checkpoints."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.layouts.composition.registry import TIMES
from equivcheck.mutants.mutant import TWO_STEPS, Minimum, fault
from equivcheck.mutants.needs import EVERYWHERE, has_optimizer_state, updates_exceed_rounding
from equivcheck.mutants.rank import around_update, mesh_of, num_microbatches, optimizer_parameters
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ASGD, FSDP2, Adafactor, Adagrad, Adam, Adamax, NAdam, RAdam, Scenario
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
    """Bug: the schedule advances once per rank in each step."""
    _step_schedule(setup, mesh_of(setup).size())


@fault(layouts=EVERYWHERE, applies=_has_microbatches, causes=(Cause.SCHEDULE,), minimum=TWO_STEPS)
def schedule_stepped_each_microbatch(setup: Setup) -> None:
    """Bug: the schedule advances once per microbatch."""
    _step_schedule(setup, num_microbatches(setup))


def _step_schedule(setup: Setup, times: int) -> None:
    """Step the schedule `times` times per update. One of these steps is done by the train loop."""
    schedules: list[LRScheduler] = []
    setup.before_training.append(lambda _optimizer, schedule: schedules.extend(() if schedule is None else (schedule,)))

    def step(_optimizer: Optimizer) -> None:
        for schedule in schedules * (times - 1):
            schedule.step()

    around_update(setup, after=step)


@fault(layouts=EVERYWHERE, applies=_has_schedule, causes=(Cause.SCHEDULE,), minimum=TWO_STEPS)
def schedule_stuck(setup: Setup) -> None:
    """Bug: the schedule never advances."""
    rates: list[float] = []

    def hold(optimizer: Optimizer, _step: int) -> None:
        rates.extend(group["lr"] for group in optimizer.param_groups[len(rates) :])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    setup.before_step.append(hold)


_RESUMABLE = tuple(name for name in EVERYWHERE if TIMES not in name or FSDP2.tag in name)
"""Layouts that can resume from a checkpoint. Other compositions train local tensors and cannot resume."""


def _counts(scenario: Scenario) -> bool:
    """Whether updates depend on the step count and there is a second step."""
    optimizer = scenario.training.optimizer
    uses = isinstance(optimizer, (Adam, Adamax, NAdam, RAdam, ASGD, Adafactor))
    return scenario.training.steps > 1 and (uses or (isinstance(optimizer, Adagrad) and optimizer.lr_decay > 0.0))


def _resumes_with_state(scenario: Scenario) -> bool:
    """Whether a checkpoint contains optimizer state."""
    return scenario.resume is not None and has_optimizer_state(scenario)


@fault(layouts=EVERYWHERE, applies=_counts, causes=(Cause.STEP_COUNT,), minimum=TWO_STEPS)
def step_not_counted(setup: Setup) -> None:
    """Bug: the optimizer treats each step as the first."""

    def forget(optimizer: Optimizer, _step: int) -> None:
        for state in setup.state_of(optimizer).values():
            if "step" in state:
                cast(MutableMapping[str, Any], state)["step"] = 0.0 * state["step"]

    setup.before_step.append(forget)


@fault(layouts=_RESUMABLE, applies=_resumes_with_state, causes=(Cause.STATE_LOST,), minimum=TWO_STEPS)
def state_not_restored(setup: Setup) -> None:
    """Bug: a checkpoint restores parameters, but not optimizer state."""
    if setup.span is None or setup.span.start == 0:
        return
    kept: dict[int, Any] = {}

    def remember(optimizer: Optimizer, _schedule: LRScheduler | None) -> None:
        kept.update(
            deepcopy({number: optimizer.state.get(each, {}) for number, each in enumerate(optimizer_parameters(optimizer))})
        )

    def restore(optimizer: Optimizer, _schedule: LRScheduler | None) -> None:
        optimizer.state.clear()
        optimizer.state.update(
            {each: kept[number] for number, each in enumerate(optimizer_parameters(optimizer)) if kept[number]}
        )

    setup.before_training.insert(0, remember)
    setup.before_training.append(restore)
