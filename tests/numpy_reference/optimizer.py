"""SGD, Adam, AdamW, Adafactor and Muon with parameter groups, and the schedules in closed form, in NumPy; no torch.

Nothing is rounded on the way, so Muon's matrices are made orthogonal in the element type of the parameters, not in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from equivcheck.errors import UsageError
from equivcheck.scenario import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    AdjustLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    Muon,
    Optimizer,
    ParameterSelection,
    Schedule,
    StepLR,
    Training,
)
from equivcheck.scenario.schedule import SCHEDULES
from numpy_reference.layers import Array

AVAILABLE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, Adafactor, Muon)
"""The optimizers written out here."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that torch's Muon has by default."""
NEWTON_SCHULZ_EPS = 1e-7
"""Smallest norm that Muon divides by."""


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
        rate *= factor
        state.num_updates += 1
        if optimizer.maximize:
            gradient = -gradient
        match optimizer:
            case Adafactor():
                return values * (1.0 - rate * decay) - _adafactor(optimizer, state, values, gradient, rate)
            case Muon():
                return values * (1.0 - rate * decay) - rate * _muon(optimizer, state, gradient)
            case AdamW():
                return values * (1.0 - rate * decay) - rate * _adam(optimizer, state, gradient)
            case Adam():
                return values - rate * _adam(optimizer, state, gradient + decay * values)
        return values - rate * _sgd(optimizer, state, gradient + decay * values)


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
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    is_odd = layer is not None and layer % 2 == 1
    taken = {
        ParameterSelection.VECTORS: values.ndim == 1,
        ParameterSelection.FIRST_LAYER: layer == 0,
        ParameterSelection.ODD_LAYERS: is_odd,
    }
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


def _adafactor(optimizer: Adafactor, state: _State, values: Array, gradient: Array, rate: float) -> Array:
    """The step to be taken away from the values."""
    eps = float(np.finfo(values.dtype).eps) if optimizer.eps[0] is None else optimizer.eps[0]
    weight = state.num_updates**optimizer.beta2_decay
    rate = min(rate, state.num_updates**-0.5) * max(optimizer.eps[1], _root_mean_square(values))
    squares = np.square(gradient)
    if gradient.ndim < 2:
        second = _moved_to(state, "second", squares, weight)
    else:
        rows = _moved_to(state, "rows", squares.mean(axis=1, keepdims=True), weight)
        columns = _moved_to(state, "columns", squares.mean(axis=0, keepdims=True), weight)
        second = rows * columns / max(float(rows.mean()), eps)
    update = gradient / np.sqrt(np.maximum(second, eps * eps))
    step: Array = rate * update / max(1.0, _root_mean_square(update) / optimizer.d)
    return step


def _moved_to(state: _State, name: str, target: Array, weight: float) -> Array:
    """A running average after one more value."""
    before = state.averages.get(name, np.zeros_like(target))
    state.averages[name] = before + weight * (target - before)
    return state.averages[name]


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _muon(optimizer: Muon, state: _State, gradient: Array) -> Array:
    momentum = _moved_to(state, "momentum", gradient, 1.0 - optimizer.momentum)
    direction = gradient + optimizer.momentum * (momentum - gradient) if optimizer.nesterov else momentum
    rows, columns = gradient.shape
    if optimizer.adjust_lr_fn is AdjustLR.ORIGINAL:
        factor = math.sqrt(max(1.0, rows / columns))
    else:
        factor = 0.2 * math.sqrt(max(rows, columns))
    return factor * _orthogonal(direction, optimizer.ns_steps)


def _orthogonal(matrix: Array, num_iterations: int) -> Array:
    """A matrix with about the same singular vectors and singular values near 1: odd polynomials of its singular values."""
    left, sizes, right = np.linalg.svd(matrix / max(float(np.linalg.norm(matrix)), NEWTON_SCHULZ_EPS), full_matrices=False)
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(num_iterations):
        sizes = first * sizes + third * sizes**3 + fifth * sizes**5
    found: Array = (left * sizes) @ right
    return found
