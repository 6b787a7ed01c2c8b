"""Train in two parts: save with `torch.distributed.checkpoint`, then resume under another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.layouts.composition.program import rank_program
from equivcheck.scenario import Resume, Scenario
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.trace import Trace

Alter = Callable[[Setup], None]


def first_part(scenario: Scenario, folder: str, alter: Alter | None = None) -> Trace:
    """Train the first steps under the first layout, then save a checkpoint into a folder that all ranks share."""
    resume = _resume(scenario)

    def prepare(setup: Setup) -> None:
        setup.span = range(resume.steps)
        setup.after_training.append(lambda optimizer, schedule: save(resume, setup, optimizer, schedule, folder))

    return rank_program(replace(scenario, layout=resume.layout, resume=None), alter, prepare)


def second_part(scenario: Scenario, folder: str, alter: Alter | None = None) -> Trace:
    """Load the checkpoint under the second layout, then train the remaining steps."""
    resume = _resume(scenario)

    def prepare(setup: Setup) -> None:
        setup.span = range(resume.steps, scenario.training.steps)
        setup.before_training.append(lambda optimizer, schedule: load(resume, setup, optimizer, schedule, folder))

    return rank_program(replace(scenario, resume=None), alter, prepare)


def _resume(scenario: Scenario) -> Resume:
    assert scenario.resume is not None, "a scenario without a checkpoint runs in one part"
    return scenario.resume


def save(resume: Resume, setup: Setup, optimizer: Optimizer, schedule: LRScheduler | None, folder: str) -> None:
    """Save model, optimizer and schedule as a checkpoint, with names that are the same under all layouts.

    Every rank must call this function.
    """
    state_dict_saver.save(_state(resume, setup, optimizer, schedule), checkpoint_id=folder)


def load(resume: Resume, setup: Setup, optimizer: Optimizer, schedule: LRScheduler | None, folder: str) -> None:
    """Load a checkpoint into model, optimizer and schedule. Any layout may have saved it. Every rank must call this function."""
    state = _state(resume, setup, optimizer, schedule)
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(
        setup.module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_options(resume),
    )


def _options(resume: Resume) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=resume.flatten_optimizer_state_dict)


def _state(resume: Resume, setup: Setup, optimizer: Optimizer, schedule: LRScheduler | None) -> dict[str, Any]:
    model, optimizer_state = get_state_dict(setup.module, optimizer, options=_options(resume))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer_state}
    return state if schedule is None else state | {"schedule": _Progress(schedule)}


class _Progress:
    """A schedule's step, without its values for each parameter group, because pipeline stages have their own groups.

    Implements `Stateful` from `torch.distributed.checkpoint`, which keeps one state for all ranks.
    """

    def __init__(self, schedule: LRScheduler) -> None:
        self._schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state without values for each parameter group. The remaining values are equal on all ranks."""
        return {name: value for name, value in self._schedule.state_dict().items() if name not in _BY_GROUP}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule's state, such as its step. Learning rates come back with the optimizer's state."""
        self._schedule.load_state_dict(state)


_BY_GROUP = ("base_lrs", "_last_lr")
"""Schedule entries with one value for each parameter group."""
