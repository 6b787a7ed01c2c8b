"""Optimizer state with a wrong step count, or lost in a checkpoint."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.layouts.composition.registry import TIMES
from equivcheck.mutants.mutant import TWO_STEPS, fault
from equivcheck.mutants.needs import EVERYWHERE, keeps_state
from equivcheck.mutants.rank import stepped
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ASGD, FSDP2, Adafactor, Adagrad, Adam, Adamax, NAdam, RAdam, Scenario
from equivcheck.training.setup import Setup

_RESUMABLE = tuple(name for name in EVERYWHERE if TIMES not in name or FSDP2.tag in name)
"""Layouts that can resume from a checkpoint; other compositions train local tensors, so they cannot."""


def _counts(scenario: Scenario) -> bool:
    """Whether updates depend on the step count and there is a second step."""
    optimizer = scenario.training.optimizer
    uses = isinstance(optimizer, (Adam, Adamax, NAdam, RAdam, ASGD, Adafactor))
    return scenario.training.steps > 1 and (uses or (isinstance(optimizer, Adagrad) and optimizer.lr_decay > 0.0))


def _resumes_with_state(scenario: Scenario) -> bool:
    """Whether a checkpoint contains optimizer state."""
    return scenario.resume is not None and keeps_state(scenario)


@fault(layouts=EVERYWHERE, applies=_counts, causes=(Cause.STEP_COUNT,), minimum=TWO_STEPS)
def step_not_counted(setup: Setup) -> None:
    """The optimizer treats each step as the first."""

    def forget(optimizer: Optimizer, _step: int) -> None:
        for state in setup.state_of(optimizer).values():
            if "step" in state:
                cast(MutableMapping[str, Any], state)["step"] = 0.0 * state["step"]

    setup.before_step.append(forget)


@fault(layouts=_RESUMABLE, applies=_resumes_with_state, causes=(Cause.STATE_LOST,), minimum=TWO_STEPS)
def state_not_restored(setup: Setup) -> None:
    """A checkpoint restores parameters, but not optimizer state."""
    if setup.span is None or setup.span.start == 0:
        return
    kept: dict[int, Any] = {}

    def remember(optimizer: Optimizer, _schedule: LRScheduler | None) -> None:
        kept.update(deepcopy({number: optimizer.state.get(each, {}) for number, each in enumerate(stepped(optimizer))}))

    def restore(optimizer: Optimizer, _schedule: LRScheduler | None) -> None:
        optimizer.state.clear()
        optimizer.state.update({each: kept[number] for number, each in enumerate(stepped(optimizer)) if kept[number]})

    setup.before_training.insert(0, remember)
    setup.before_training.append(restore)
