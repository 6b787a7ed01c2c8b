"""Build torch optimizers and learning rate schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch.optim import lr_scheduler

from equivcheck.scenario import Implementation, Optimizer, ParameterGroup, ParameterSelection, Schedule, Training
from equivcheck.system.choice import PrintableEnum
from equivcheck.training.layers.parameters import layer_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OptimizerParts:
    """Class and arguments from which the training's torch optimizer is built."""

    kind: type[torch.optim.Optimizer]
    """Optimizer class."""
    groups: list[dict[str, Any]]
    """Parameter groups, each with its own options."""
    arguments: dict[str, Any]
    """Further constructor arguments, such as ``lr``."""


def optimizer_parts(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> OptimizerParts:
    """Return class and arguments for the training's optimizer. `parameters` contains canonical names and parameters.

    Parameter groups without parameters are left out.
    """
    chosen: dict[ParameterGroup | None, list[torch.Tensor]] = {None: [], **{group: [] for group in training.groups}}
    for name, parameter in parameters:
        chosen[group_of(training, name)].append(parameter)
    groups = [_settings(training.optimizer, group) | {"params": members} for group, members in chosen.items() if members]
    kind = getattr(torch.optim, type(training.optimizer).__name__)
    return OptimizerParts(kind=kind, groups=groups, arguments=_arguments(training.optimizer))


def build_optimizer(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    """Build the training's optimizer for these parameters with their canonical names."""
    parts = optimizer_parts(training, parameters)
    return parts.kind(parts.groups, **parts.arguments)


def build_schedule(schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler | None:
    """Build the learning rate scheduler; None if the learning rate is constant."""
    if schedule is None:
        return None
    settings = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    built: lr_scheduler.LRScheduler = getattr(lr_scheduler, type(schedule).__name__)(optimizer, **settings)
    return built


def selects(group: ParameterGroup, name: str) -> bool:
    """Whether a parameter group contains the parameter with this canonical name."""
    if group.select is ParameterSelection.VECTORS:
        return name.endswith(("bias", "norm.weight"))
    layer = layer_of(name)
    return layer == 0 if group.select is ParameterSelection.FIRST_LAYER else layer is not None and layer % 2 == 1


def group_of(training: Training, name: str) -> ParameterGroup | None:
    """Return the parameter group for the parameter with this canonical name; None for the default group."""
    return next((group for group in training.groups if selects(group, name)), None)


def _settings(optimizer: Optimizer, group: ParameterGroup | None) -> dict[str, Any]:
    if group is None:
        return {}
    settings: dict[str, Any] = {"lr": optimizer.lr * group.lr_factor}
    return settings if not optimizer.decays else settings | {"weight_decay": group.weight_decay}


@cache
def _names(kind: type[Optimizer]) -> tuple[str, ...]:
    left_out = {"implementation"}
    if not kind.decays:
        left_out.add("weight_decay")
    if not kind.has_maximize:
        left_out.add("maximize")
    return tuple(field.name for field in fields(kind) if field.name not in left_out)


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    values = {name: getattr(optimizer, name) for name in _names(type(optimizer))}  # type: ignore[arg-type]
    arguments = {name: value.value if isinstance(value, PrintableEnum) else value for name, value in values.items()}
    if optimizer.has_foreach:
        arguments["foreach"] = optimizer.implementation is Implementation.FOREACH
    if optimizer.has_fused:
        arguments["fused"] = optimizer.implementation is Implementation.FUSED
    return arguments
