"""Wrong optimizer settings, step counts, weight decay and schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Change, Counterfactual, around_update, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Optimizer
from equivcheck.training.optimizer import build_optimizer
from equivcheck.training.setup import Setup

Settings = dict[str, Any]
"""A parameter group."""


def wrong_optimizers(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Wrong weight decay, schedule, step count or setting."""
    yield from _decay(diverged)
    yield from _schedule(diverged)
    yield from _step_count(diverged)
    yield from _settings(diverged)


def _decay(diverged: DivergedRun) -> Iterator[Counterfactual]:
    training = diverged.training
    own, groups = training.optimizer.weight_decay, [group.weight_decay for group in training.groups]
    if any(decay != own for decay in groups):
        cause, words = Cause.DECAY_EVERYWHERE, f"weight decay {own:g} is applied"
        yield on_one_device(diverged, cause, f"{words} to all groups", _grouped(lambda group: group.update(weight_decay=own)))
        change = _grouped(lambda group: group["weight_decay"] or group.update(weight_decay=own))
        yield on_one_device(diverged, cause, f"{words} to groups that should have none", change)
        for other in dict.fromkeys(decay for decay in groups if decay != own):
            words = f"weight decay {other:g}, meant for one group, is applied to all groups"
            yield on_one_device(diverged, cause, words, _grouped(lambda group, other=other: group.update(weight_decay=other)))  # type: ignore[misc]
    if not any((own, *groups)):
        return
    coupled = "weight decay is coupled: added to the gradients, not subtracted from the parameters"
    yield on_one_device(diverged, Cause.DECAY_COUPLED, coupled, partial(_decaying, coupled=True, extra=False))
    decoupled = "weight decay is decoupled: subtracted from the parameters, not added to the gradients"
    yield on_one_device(diverged, Cause.DECAY_COUPLED, decoupled, partial(_decaying, coupled=False, extra=False))
    yield on_one_device(diverged, Cause.DECAY_TWICE, "weight decay is twice the configured value", _grouped(_double_decay))
    for is_coupled in (False, True):
        change = partial(_decaying, coupled=is_coupled, extra=True)
        yield on_one_device(diverged, Cause.DECAY_TWICE, "weight decay is applied twice", change)
    without = _grouped(lambda group: group.update(weight_decay=0.0))
    yield on_one_device(diverged, Cause.HYPERPARAMETER, "weight decay is not applied", without)


def _double_decay(group: Settings) -> None:
    group["weight_decay"] *= 2


def _grouped(change: Callable[[Settings], object]) -> Change:
    """Change each parameter group before the first step."""

    def apply(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        for group in optimizer.param_groups:
            change(group)

    return lambda setup: setup.before_training.append(apply)


def _decaying(setup: Setup, *, coupled: bool, extra: bool) -> None:
    """Decay explicitly before each update, in addition to the optimizer (`extra`) or in its place."""
    decays: list[float] = []

    def prepare(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        for group in optimizer.param_groups:
            decays.append(float(group.get("weight_decay", 0.0)))
            if not extra and "weight_decay" in group:
                group["weight_decay"] = 0.0

    @contextmanager
    def decay_before_update(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _decay_one(parameter, decay, group, coupled=coupled)
        yield

    setup.before_training.append(prepare)
    around_update(setup, decay_before_update)


def _decay_one(parameter: torch.Tensor, decay: float, group: Settings, *, coupled: bool) -> None:
    if not coupled:
        parameter.data.mul_(1.0 - float(group["lr"]) * decay)
    else:
        assert parameter.grad is not None
        parameter.grad.add_(parameter.data, alpha=-decay if group.get("maximize") else decay)


def _schedule(diverged: DivergedRun) -> Iterator[Counterfactual]:
    training = diverged.training
    if training.schedule is None:
        return
    times = dict.fromkeys((diverged.mesh.num_ranks, len(training.data.microbatches), 2))
    yield on_one_device(diverged, Cause.SCHEDULE, "the schedule never advances", _advancing(0))
    yield on_one_device(diverged, Cause.SCHEDULE, "the schedule advances before the update, not after it", _advance_early)
    for count in (count for count in times if count > 1):
        yield on_one_device(diverged, Cause.SCHEDULE, f"the schedule advances {count} times per step", _advancing(count))


def _advancing(times: int) -> Change:
    def prepare(_optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler | None) -> None:
        assert schedule is not None, "the training has a schedule"
        step = schedule.step

        def advance() -> None:
            for _ in range(times):
                step()

        schedule.step = advance  # type: ignore[assignment, method-assign]

    return lambda setup: setup.before_training.append(prepare)


def _advance_early(setup: Setup) -> None:
    setup.before_training.append(lambda _optimizer, schedule: None if schedule is None else schedule.step())


def _step_count(diverged: DivergedRun) -> Iterator[Counterfactual]:
    ways: tuple[tuple[str, Callable[[torch.Tensor], object], bool], ...] = (
        ("the optimizer counts every step as the first", lambda count: count.zero_(), True),
        ("the optimizer's step count does not advance", lambda count: count.sub_(1), False),
        ("the optimizer's step count advances twice per step", lambda count: count.add_(1), False),
    )
    for words, change, before in ways:
        yield on_one_device(diverged, Cause.STEP_COUNT, words, _counting(change, before=before))


def _counting(change: Callable[[torch.Tensor], object], *, before: bool) -> Change:
    def count(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                change(state["step"])

    @contextmanager
    def count_around_update(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        if before:
            count(optimizer)
        yield
        if not before:
            count(optimizer)

    return lambda setup: around_update(setup, count_around_update)


def _settings(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """One setting has torch's default or a commonly used value."""
    optimizer = diverged.training.optimizer
    for name in (field.name for field in fields(optimizer) if field.name not in ("implementation", "weight_decay")):
        own = getattr(optimizer, name)
        for value in dict.fromkeys(_other_values(diverged, optimizer, name, own)):
            if value != own:
                words = f"the optimizer runs with {name} = {value}, not {own}"
                yield on_one_device(diverged, Cause.HYPERPARAMETER, words, _setting(name, value, own))
    if any(group.lr_factor != 1.0 for group in diverged.training.groups):
        words = f"all groups use the learning rate {optimizer.lr:g} instead of their own"
        yield on_one_device(diverged, Cause.HYPERPARAMETER, words, _ungrouped)


def _setting(name: str, value: Any, own: Any) -> Change:
    def change(group: Settings) -> None:
        if name == "lr":
            group["lr"] *= value / own
        elif name in group:
            group[name] = value

    return _grouped(change)


def _ungrouped(setup: Setup) -> None:
    def build(training: Any, parameters: Any) -> torch.optim.Optimizer:
        built = build_optimizer(training, parameters)
        for group in built.param_groups:
            group["lr"] = training.optimizer.lr
        return built

    setup.build_optimizer = build


def _other_values(diverged: DivergedRun, optimizer: Optimizer, name: str, own: Any) -> Iterator[Any]:
    kind = getattr(torch.optim, type(optimizer).__name__)
    default = inspect.signature(kind).parameters.get(name)
    if default is not None and default.default is not inspect.Parameter.empty and type(default.default) is type(own):
        yield default.default
    if isinstance(own, bool):
        yield not own
    elif name == "betas":
        first, second = own
        yield from ((first, other) for other in (0.999, 0.99, 0.95, 0.9, 0.98, 0.0, max(0.0, round(10 * second - 9, 12)), first))
        yield from ((other, second) for other in (0.9, 0.0, 0.99, 0.95))
        yield second, first
    elif isinstance(own, float):
        yield from _other_numbers(diverged, name, own)


def _other_numbers(diverged: DivergedRun, name: str, own: float) -> Iterator[float]:
    if name == "eps":
        yield from (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-15, own * 100, own / 100)
        return
    mesh = diverged.mesh
    counts = dict.fromkeys((*mesh.shape, mesh.num_ranks, len(diverged.training.data.microbatches), 2, 10))
    yield from (value for count in counts if count > 1 for value in (own * count, own / count))
    if name != "lr":
        yield from (0.0, 0.5, 0.9, 0.99)
