"""What a training starts from: initial parameters and data, drawn from its seed once and shared by every run of it.

Drawn with NumPy rather than torch: torch's default generator is one for the whole process, and ranks may be threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.layers.parameters import SCALE, Parameter, parameters_of
from equivcheck.scenario import Layer, Model, Training

Array = npt.NDArray[np.floating]

KEPT_TRAININGS = 16
"""Materials kept: a scenario is looked up again by every rank and while it shrinks; each is some tens of KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch; never written to."""

    inputs: torch.Tensor
    """Shape (rows, features), or (features, rows) with rows along dim 1."""
    targets: torch.Tensor
    """Shape (rows, outputs), or (outputs, rows)."""
    masks: tuple[torch.Tensor | None, ...]
    """Per layer, the dropout mask of shape (rows, width), scaled by 1 / (1 - p); None for a layer without dropout."""
    batch_dim: int = 0
    """The dim of inputs and targets along which the rows lie; of a batch of several copies, the dim within a copy."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.inputs.shape[self.batch_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Initial parameters and all batches of a training."""

    parameters: dict[str, torch.Tensor]
    """By canonical name, shared weights once; never written to."""
    steps: tuple[tuple[Batch, ...], ...]
    """Per step, its microbatches."""


@lru_cache(maxsize=KEPT_TRAININGS)
def material(training: Training) -> Material:
    """Draw the material of a training from its seed."""
    generator = np.random.default_rng(training.seed)
    dtype = np.dtype(training.precision.value)
    parameters = {
        name: torch.from_numpy(values.astype(dtype)) for name, values in _draw_parameters(training.model, generator).items()
    }
    steps = tuple(
        tuple(
            _laid(_draw_batch(training.model, rows, generator, dtype), training.data.batch_dim)
            for rows in training.data.microbatches
        )
        for _ in range(training.steps)
    )
    return Material(parameters=parameters, steps=steps)


def _draw_parameters(model: Model, generator: np.random.Generator) -> dict[str, Array]:
    return {parameter.full_name: _draw(parameter, generator) for parameter in parameters_of(model)}


def _draw(parameter: Parameter, generator: np.random.Generator) -> Array:
    match parameter.name:
        case "norm.weight":
            return generator.uniform(0.5, 1.5, parameter.shape)
        case "norm.bias":
            return generator.uniform(-0.5, 0.5, parameter.shape)
        case "linear.bias":
            return _with_positive_first(generator.uniform(-0.5, 0.5, parameter.shape))
        case SCALE.name:
            return np.asarray(generator.uniform(0.5, 1.5, parameter.shape))
    weight = generator.standard_normal(parameter.shape) / np.sqrt(parameter.shape[1])
    return _with_positive_first(weight) if parameter.name == "linear.weight" else weight


def _with_positive_first(values: Array) -> Array:
    """Values whose first row is not negative.

    The first unit of each layer, for the first row of each microbatch, then rarely dies in a ReLU: a small network in which no
    unit is alive has no gradient, and proves nothing.
    """
    values[0] = np.abs(values[0])
    return values


def _draw_batch(model: Model, rows: int, generator: np.random.Generator, dtype: np.dtype[np.floating]) -> Batch:
    inputs = _with_positive_first(generator.standard_normal((rows, model.features)))
    targets = generator.standard_normal((rows, model.outputs))
    masks = tuple(_draw_mask(layer, rows, generator, dtype) for layer in model.layers)
    return Batch(inputs=torch.from_numpy(inputs.astype(dtype)), targets=torch.from_numpy(targets.astype(dtype)), masks=masks)


def _laid(batch: Batch, batch_dim: int) -> Batch:
    """The same batch with its rows along a dim."""
    if batch_dim == 0:
        return batch
    return Batch(inputs=batch.inputs.T.contiguous(), targets=batch.targets.T.contiguous(), masks=batch.masks, batch_dim=batch_dim)


def _draw_mask(layer: Layer, rows: int, generator: np.random.Generator, dtype: np.dtype[np.floating]) -> torch.Tensor | None:
    if not layer.dropout:
        return None
    kept = generator.random((rows, layer.width)) >= layer.dropout
    kept[0, 0] = True
    return torch.from_numpy((kept / (1.0 - layer.dropout)).astype(dtype))
