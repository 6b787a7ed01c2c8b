"""Optimizers and schedules that run with other settings, counts or decay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone
from equivcheck.scenario import Optimizer
from equivcheck.train.optimizer import build_optimizer
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

Settings = dict[str, Any]
"""A parameter group of a torch optimizer."""


def wrong_optimizers(case: Case) -> Iterator[Counterfactual]:
    """Decay where it should not be, coupled or twice; steps counted wrongly; a schedule out of step; other settings."""
    yield from _decay(case)
    yield from _schedule(case)
    yield from _step_count(case)
    yield from _settings(case)


def _decay(case: Case) -> Iterator[Counterfactual]:
    training = case.scenario.training
    own, groups = training.optimizer.weight_decay, [group.weight_decay for group in training.groups]
    if any(decay != own for decay in groups):
        words = f"weight decay {own:g} is applied to all groups"
        yield alone(case, Cause.DECAY_EVERYWHERE, words, _grouped(lambda group: group.update(weight_decay=own)))
        words = f"weight decay {own:g} is applied to groups that should have none"
        yield alone(
            case, Cause.DECAY_EVERYWHERE, words, _grouped(lambda group: group["weight_decay"] or group.update(weight_decay=own))
        )
        for other in dict.fromkeys(decay for decay in groups if decay != own):
            words = f"weight decay {other:g}, that of a group, is applied to all"
            change = _grouped(lambda group, other=other: group.update(weight_decay=other))  # type: ignore[misc]
            yield alone(case, Cause.DECAY_EVERYWHERE, words, change)
    if not any((own, *groups)):
        return
    for coupled, words in (
        (True, "weight decay is added to the gradients, not taken off the parameters"),
        (False, "weight decay is taken off the parameters, not added to the gradients"),
    ):
        yield alone(case, Cause.DECAY_COUPLED, words, _decaying(coupled=coupled, extra=False))
    yield alone(case, Cause.DECAY_TWICE, "weight decay is twice as large", _grouped(_double_decay))
    for coupled in (False, True):
        yield alone(case, Cause.DECAY_TWICE, "weight decay is applied twice", _decaying(coupled=coupled, extra=True))
    words = "weight decay is left out"
    yield alone(case, Cause.HYPERPARAMETER, words, _grouped(lambda group: group.update(weight_decay=0.0)))


def _double_decay(group: Settings) -> None:
    group["weight_decay"] *= 2


def _grouped(change: Callable[[Settings], object]) -> Callable[[Setup], None]:
    """Change the settings of each group that has weight decay, before the first step."""

    def apply(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        for group in optimizer.param_groups:
            change(group)

    return lambda setup: setup.before_training.append(apply)


def _decaying(*, coupled: bool, extra: bool) -> Callable[[Setup], None]:
    """Decay by hand before each update, beside what the optimizer does or in its place."""

    def change(setup: Setup) -> None:
        decays: list[float] = []

        def prepare(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
            for group in optimizer.param_groups:
                decays.append(float(group.get("weight_decay", 0.0)))
                if not extra and "weight_decay" in group:
                    group["weight_decay"] = 0.0

        def update(optimizer: torch.optim.Optimizer) -> None:
            for group, decay in zip(optimizer.param_groups, decays, strict=True):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _decay_one(parameter, decay, group, coupled=coupled)
            inner(optimizer)

        inner = setup.update
        setup.before_training.append(prepare)
        setup.update = update

    return change


def _decay_one(parameter: torch.Tensor, decay: float, group: Settings, *, coupled: bool) -> None:
    if not coupled:
        parameter.data.mul_(1.0 - float(group["lr"]) * decay)
    else:
        assert parameter.grad is not None
        parameter.grad.add_(parameter.data, alpha=-decay if group.get("maximize") else decay)


def _schedule(case: Case) -> Iterator[Counterfactual]:
    training = case.scenario.training
    if training.schedule is None:
        return
    times = dict.fromkeys((case.scenario.layout.mesh.num_ranks, len(training.data.microbatches), 2))
    yield alone(case, Cause.SCHEDULE, "the schedule never advances", _advancing(0))
    yield alone(case, Cause.SCHEDULE, "the schedule advances before the update, not after it", _ahead)
    for count in (count for count in times if count > 1):
        yield alone(case, Cause.SCHEDULE, f"the schedule advances {count} times each step", _advancing(count))


def _advancing(times: int) -> Callable[[Setup], None]:
    def prepare(_optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler | None) -> None:
        assert schedule is not None, "the training has a schedule"
        step = schedule.step

        def advance() -> None:
            for _ in range(times):
                step()

        schedule.step = advance  # type: ignore[assignment, method-assign]

    return lambda setup: setup.before_training.append(prepare)


def _ahead(setup: Setup) -> None:
    setup.before_training.append(lambda _optimizer, schedule: None if schedule is None else schedule.step())


def _step_count(case: Case) -> Iterator[Counterfactual]:
    ways: tuple[tuple[str, Callable[[torch.Tensor], object], bool], ...] = (
        ("the optimizer counts every step as the first", lambda count: count.zero_(), True),
        ("the optimizer's count of steps does not advance", lambda count: count.sub_(1), False),
        ("the optimizer counts every step twice", lambda count: count.add_(1), False),
    )
    for words, change, before in ways:
        yield alone(case, Cause.STEP_COUNT, words, _counting(change, before=before))


def _counting(change: Callable[[torch.Tensor], object], *, before: bool) -> Callable[[Setup], None]:
    def count(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                change(state["step"])

    def apply(setup: Setup) -> None:
        inner = setup.update

        def update(optimizer: torch.optim.Optimizer) -> None:
            if before:
                count(optimizer)
            inner(optimizer)
            if not before:
                count(optimizer)

        setup.update = update

    return apply


def _settings(case: Case) -> Iterator[Counterfactual]:
    """One setting with another value: what torch has where nothing is given, or what people write."""
    optimizer = case.scenario.training.optimizer
    for name in (field.name for field in fields(optimizer) if field.name not in ("implementation", "weight_decay")):
        own = getattr(optimizer, name)
        for value in dict.fromkeys(_others(case, optimizer, name, own)):
            if value != own:
                words = f"the optimizer runs with {name} = {value}, not {own}"
                yield alone(case, Cause.HYPERPARAMETER, words, _setting(name, value, own))
    if any(group.lr_factor != 1.0 for group in case.scenario.training.groups):
        words = f"all groups have the learning rate {optimizer.lr:g}"
        yield alone(case, Cause.HYPERPARAMETER, words, _ungrouped)


def _setting(name: str, value: Any, own: Any) -> Callable[[Setup], None]:
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


def _others(case: Case, optimizer: Optimizer, name: str, own: Any) -> Iterator[Any]:
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
        yield from _numbers(case, name, own)


def _numbers(case: Case, name: str, own: float) -> Iterator[float]:
    if name == "eps":
        yield from (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-15, own * 100, own / 100)
        return
    mesh = case.scenario.layout.mesh
    counts = dict.fromkeys((*mesh.shape, mesh.num_ranks, len(case.scenario.training.data.microbatches), 2, 10))
    yield from (value for count in counts if count > 1 for value in (own * count, own / count))
    if name != "lr":
        yield from (0.0, 0.5, 0.9, 0.99)
