"""What a training starts from: initial parameters and data, drawn from its seed once and shared by every run of it.

Drawn with NumPy rather than torch: torch's default generator is one for the whole process, and ranks may be threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.scenario import Layer, Model, Norm, Training

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
    drawn: dict[str, Array] = {}
    for index, layer in enumerate(model.layers):
        drawn |= {f"layers.{index}.{name}": values for name, values in _draw_layer(layer, model.inputs(index), generator).items()}
    return drawn


def _draw_layer(layer: Layer, inputs: int, generator: np.random.Generator) -> dict[str, Array]:
    drawn: dict[str, Array] = {}
    if layer.norm is not None:
        drawn["norm.weight"] = generator.uniform(0.5, 1.5, inputs)
    if layer.norm is Norm.LAYER:
        drawn["norm.bias"] = generator.uniform(-0.5, 0.5, inputs)
    if layer.shares is None:
        drawn["linear.weight"] = _with_positive_first(generator.standard_normal((layer.width, inputs)) / np.sqrt(inputs))
    if layer.bias:
        drawn["linear.bias"] = _with_positive_first(generator.uniform(-0.5, 0.5, layer.width))
    if layer.side is not None:
        drawn["side.weight"] = generator.standard_normal((layer.width, inputs)) / np.sqrt(inputs)
    return drawn


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
