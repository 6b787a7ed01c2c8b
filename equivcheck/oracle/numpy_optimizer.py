"""SGD, Adam and AdamW with parameter groups, and the schedules in closed form, in NumPy; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from equivcheck.errors import UsageError
from equivcheck.oracle.numpy_layers import Array
from equivcheck.scenario import (
    SGD,
    Adam,
    AdamW,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    Optimizer,
    Schedule,
    Select,
    StepLR,
    Training,
)
from equivcheck.scenario.schedule import SCHEDULES

AVAILABLE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
"""The optimizers written out here."""


@dataclass(slots=True)
class _State:
    """What is remembered of one parameter."""

    num_updates: int = 0
    averages: dict[str, Array] = field(default_factory=dict)


class NumpyOptimizer:
    """Updates parameters as `torch.optim` documents it. Raises `UsageError` for an optimizer that is not written out here."""

    def __init__(self, training: Training, parameters: Mapping[str, Array]) -> None:
        if type(training.optimizer) not in AVAILABLE:
            names = ", ".join(kind.__name__ for kind in AVAILABLE)
            raise UsageError(f"optimizer {type(training.optimizer).__name__} has no NumPy reference; available: {names}")
        self._training = training
        self._settings = {name: _group_settings(training, name, values) for name, values in parameters.items()}
        self._states = {name: _State() for name in parameters}

    def update(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array | None], step: int) -> dict[str, Array]:
        """The parameters after the update of `step`, from 0; one whose gradient is None stays as it is."""
        factor = schedule_factor(self._training.schedule, step)
        updated = {}
        for name, values in parameters.items():
            gradient = gradients[name]
            updated[name] = values if gradient is None else self._updated(name, values, gradient, factor)
        return updated

    def _updated(self, name: str, values: Array, gradient: Array, factor: float) -> Array:
        optimizer, state = self._training.optimizer, self._states[name]
        rate, decay = self._settings[name]
        state.num_updates += 1
        if optimizer.maximize:
            gradient = -gradient
        if isinstance(optimizer, AdamW):
            values = values - rate * factor * decay * values
        else:
            gradient = gradient + decay * values
        direction = _adam(optimizer, state, gradient) if isinstance(optimizer, Adam) else _sgd(optimizer, state, gradient)
        return values - rate * factor * direction


def schedule_factor(schedule: Schedule | None, step: int) -> float:
    """What a schedule multiplies the learning rate by at a step, from 0."""
    match schedule:
        case None:
            return 1.0
        case StepLR():
            return schedule.gamma ** (step // schedule.step_size)
        case ExponentialLR():
            return schedule.gamma**step
        case LinearLR():
            return schedule.start_factor + (1.0 - schedule.start_factor) * min(step / schedule.total_iters, 1.0)
        case CosineAnnealingLR():
            return (1.0 + math.cos(math.pi * step / schedule.T_max)) / 2.0
        case _:
            names = ", ".join(kind.__name__ for kind in SCHEDULES)
            raise UsageError(f"schedule {type(schedule).__name__} has no NumPy reference; available: {names}")


def _group_settings(training: Training, name: str, values: Array) -> tuple[float, float]:
    """The learning rate and weight decay of a parameter: those of the first group that takes it, else the optimizer's."""
    layer = int(name.split(".")[1])
    taken = {Select.VECTORS: values.ndim == 1, Select.FIRST_LAYER: layer == 0, Select.ODD_LAYERS: layer % 2 == 1}
    for group in training.groups:
        if taken[group.select]:
            return training.optimizer.lr * group.lr_factor, group.weight_decay
    return training.optimizer.lr, training.optimizer.weight_decay


def _sgd(optimizer: Optimizer, state: _State, gradient: Array) -> Array:
    assert isinstance(optimizer, SGD), "the constructor refuses any other"
    if optimizer.momentum == 0.0:
        return gradient
    before = state.averages.get("momentum")
    # The first gradient starts the average undampened.
    momentum = gradient if before is None else optimizer.momentum * before + (1.0 - optimizer.dampening) * gradient
    state.averages["momentum"] = momentum
    return gradient + optimizer.momentum * momentum if optimizer.nesterov else momentum


def _adam(optimizer: Adam, state: _State, gradient: Array) -> Array:
    first_beta, second_beta = optimizer.betas
    averages, zeros = state.averages, np.zeros_like(gradient)
    averages["first"] = first_beta * averages.get("first", zeros) + (1.0 - first_beta) * gradient
    averages["second"] = second_beta * averages.get("second", zeros) + (1.0 - second_beta) * np.square(gradient)
    second = averages["second"]
    if optimizer.amsgrad:
        second = averages["largest"] = np.maximum(averages.get("largest", zeros), second)
    unbiased_first = averages["first"] / (1.0 - first_beta**state.num_updates)
    unbiased_second = second / (1.0 - second_beta**state.num_updates)
    direction: Array = unbiased_first / (np.sqrt(unbiased_second) + optimizer.eps)
    return direction
