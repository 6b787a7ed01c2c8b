"""Initial parameters and data, drawn once from the training's seed and shared by all runs.

NumPy draws them, because torch's default generator is process-wide and ranks may be threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.scenario import CrossEntropy, IgnoredLabels, Model, Training
from equivcheck.training.documents import precedes_boundary
from equivcheck.training.labels import (
    IGNORED,
    count_labels,
    label_weights,
    labels_two_ahead,
    weigh_predictions,
    with_weights,
)
from equivcheck.training.layers.facts import Initialization
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.training.layers.registry import layer_kind

Array = npt.NDArray[np.floating]

KEPT_TRAININGS = 16
"""Maximum number of cached trainings, some tens of KiB each. Every rank and every shrinking step requests the same trainings."""


IGNORED_SHARE = 1 / 3
"""Probability for an ignored label under `IgnoredLabels.SOME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch, or a rank's part of it. Its tensors are never changed."""

    inputs: torch.Tensor
    """Shape (rows, features), or (features, rows) if the batch dim is 1.

    Sequences are (rows, length, features) or (length, rows, features); tokens have no last dim."""
    targets: torch.Tensor
    """Shape like `inputs`, with output features. Labels have no last dim and are `IGNORED` if they do not count.
    Two predictions have a dim before the features. Weighted labels have a last dim with label and weight."""
    masks: tuple[torch.Tensor | None, ...]
    """Dropout mask for each layer, scaled by 1 / (1 - p); shape (rows, width) or (rows, length, width). None without dropout."""
    divisor: float = 1.0
    """Number by which a cross-entropy is divided, equal in all microbatches in a step."""
    batch_dim: int = 0
    """Dim along which inputs and targets have rows. A dim with model copies is not counted."""
    whole: Batch | None = None
    """The full microbatch, if one device computes this batch as a part of it. Losses over all rows need it."""

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return self.inputs.shape[self.batch_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Initial parameters and all batches of a training."""

    parameters: dict[str, torch.Tensor]
    """Parameters by canonical name, without duplicates for shared weights. The tensors are never changed."""
    steps: tuple[tuple[Batch, ...], ...]
    """Microbatches for each step."""


@lru_cache(maxsize=KEPT_TRAININGS)
def material(training: Training) -> Material:
    """Draw initial parameters and data from the training's seed."""
    generator = np.random.default_rng(training.seed)
    dtype = np.dtype(training.precision.value)
    parameters = {
        name: torch.from_numpy(values.astype(dtype)) for name, values in _draw_parameters(training.model, generator).items()
    }
    steps = tuple(_draw_step(training, step, generator) for step in range(training.steps))
    return Material(parameters=parameters, steps=steps)


def _draw_parameters(model: Model, generator: np.random.Generator) -> dict[str, Array]:
    return {parameter.full_name: _draw(parameter, generator) for parameter in parameters_of(model)}


def _draw(parameter: Parameter, generator: np.random.Generator) -> Array:
    match parameter.initial:
        case Initialization.FACTOR:
            return np.asarray(generator.uniform(0.5, 1.5, parameter.shape))
        case Initialization.OFFSET:
            return generator.uniform(-0.5, 0.5, parameter.shape)
        case Initialization.UNIT_OFFSET:
            return _with_positive_first(generator.uniform(-0.5, 0.5, parameter.shape))
        case Initialization.TABLE:
            return generator.standard_normal(parameter.shape)
    weight = generator.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
    return _with_positive_first(weight) if parameter.initial is Initialization.UNIT_WEIGHT else weight


def _with_positive_first(values: Array) -> Array:
    """Make the first row non-negative.

    Then the first unit in each layer rarely dies in a ReLU on the first row of a microbatch. A small network with only dead units
    has no gradient and tests nothing.
    """
    values[0] = np.abs(values[0])
    return values


def _draw_step(training: Training, step: int, generator: np.random.Generator) -> tuple[Batch, ...]:
    batches = tuple(_draw_batch(training, rows, generator) for rows in training.microbatches_at(step))
    if isinstance(training.loss, CrossEntropy):
        batches = _counted(training, batches, generator)
    return tuple(_laid(batch, training.data.batch_dim) for batch in batches)


def _draw_batch(training: Training, rows: int, generator: np.random.Generator) -> Batch:
    model, dtype = training.model, np.dtype(training.precision.value)
    shape = (rows,) if model.length is None else (rows, model.length)
    if model.source is None:
        inputs = torch.from_numpy(_with_positive_first(generator.standard_normal((*shape, model.features))).astype(dtype))
    else:
        inputs = torch.from_numpy(generator.integers(0, model.source.vocabulary, shape))
    if isinstance(training.loss, CrossEntropy):
        targets = torch.from_numpy(generator.integers(0, model.out_features, shape))
    else:
        targets = torch.from_numpy(generator.standard_normal((*shape, *model.output_shape)).astype(dtype))
    masks = tuple(_draw_mask(model, index, rows, generator, dtype) for index in range(len(model.layers)))
    return Batch(inputs=inputs, targets=targets, masks=masks)


def _counted(training: Training, batches: tuple[Batch, ...], generator: np.random.Generator) -> tuple[Batch, ...]:
    """Set ignored labels to `IGNORED`, weigh labels, and compute the loss divisor."""
    loss, classes = training.loss, training.model.out_features
    assert isinstance(loss, CrossEntropy), "other losses count no labels"
    kept = [_draw_counts(loss, number, batch, generator) for number, batch in enumerate(batches)]
    boundaries = precedes_boundary(training.model.length or 1, training.model.document_length)
    if training.model.packs_documents:
        kept = [counts & ~boundaries.numpy() for counts in kept]
    if not any(counts.any() for counts in kept):
        kept[-1].flat[-1] = True
    targets = [batch.targets.masked_fill(torch.from_numpy(~counts), IGNORED) for batch, counts in zip(batches, kept, strict=True)]
    dtype = getattr(torch, training.precision.value)
    if training.model.predicts_two:
        targets = [torch.stack((labels, labels_two_ahead(labels, boundaries)), -1) for labels in targets]
        weights = weigh_predictions(loss, classes, targets)
        targets = [with_weights(labels, each.to(dtype)) for labels, each in zip(targets, weights, strict=True)]
    elif loss.weighs_labels:
        targets = [with_weights(labels, label_weights(loss, classes, labels).to(dtype)) for labels in targets]
    divisor = 1.0 if loss.summed else sum(count_labels(loss, classes, labels) for labels in targets)
    return tuple(replace(batch, targets=labels, divisor=divisor) for batch, labels in zip(batches, targets, strict=True))


def _draw_counts(loss: CrossEntropy, number: int, batch: Batch, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return whether each label in a microbatch is kept."""
    shape, rows = tuple(batch.targets.shape), batch.rows
    if loss.ignored is IgnoredLabels.SOME:
        return generator.random(shape) >= IGNORED_SHARE
    counts = np.ones(shape, dtype=np.bool_)
    if loss.ignored is IgnoredLabels.FIRST_ROWS:
        counts[: rows // 2] = False
    if loss.ignored is IgnoredLabels.FIRST_MICROBATCH and number == 0:
        counts[:] = False
    return counts


def _laid(batch: Batch, batch_dim: int) -> Batch:
    if batch_dim == 0:
        return batch
    inputs, targets = (values.transpose(0, 1).contiguous() for values in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, batch_dim=batch_dim)


def _draw_mask(
    model: Model, index: int, rows: int, generator: np.random.Generator, dtype: np.dtype[np.floating]
) -> torch.Tensor | None:
    layer = model.layers[index]
    shape = layer_kind(layer).mask_shape(layer, model.in_features(index), model.length)
    if shape is None:
        return None
    kept = generator.random((rows, *shape)) >= layer.dropout
    kept.flat[0] = True
    return torch.from_numpy((kept / (1.0 - layer.dropout)).astype(dtype))
