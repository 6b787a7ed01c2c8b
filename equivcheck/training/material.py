"""What a training starts from: initial parameters and data, drawn from its seed once and shared by every run of it.

Drawn with NumPy rather than torch: torch's default generator is one for the whole process, and ranks may be threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.scenario import CrossEntropy, Ignored, Model, Training
from equivcheck.training.layers.facts import Initial
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.training.layers.registry import kind_of

Array = npt.NDArray[np.floating]

KEPT_TRAININGS = 16
"""Materials kept: a scenario is looked up again by every rank and while it shrinks; each is some tens of KiB."""


IGNORED = -100
"""A label that does not count, as torch has it."""
IGNORED_SHARE = 1 / 3
"""How likely a label is not to count under `Ignored.SOME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch; never written to."""

    inputs: torch.Tensor
    """Shape (rows, features), or (features, rows) with rows along dim 1.

    Of sequences (rows, length, features) or (length, rows, features), of tokens the same without features.
    """
    targets: torch.Tensor
    """As `inputs`, with outputs in place of features; labels are without outputs, and `IGNORED` where they do not count."""
    masks: tuple[torch.Tensor | None, ...]
    """Per layer, the dropout mask of shape (rows, width), or (rows, length, width), scaled by 1 / (1 - p); None for none."""
    divisor: float = 1.0
    """What a loss of labels is divided by, the same for all microbatches of a step."""
    batch_dim: int = 0
    """The dim of inputs and targets along which the rows lie; of a batch of several copies, the dim within a copy."""
    whole: Batch | None = None
    """The microbatch that it is a part of, where one device computes that in parts, and a loss looks at all of it."""

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
    steps = tuple(_draw_step(training, generator) for _ in range(training.steps))
    return Material(parameters=parameters, steps=steps)


def _draw_parameters(model: Model, generator: np.random.Generator) -> dict[str, Array]:
    return {parameter.full_name: _draw(parameter, generator) for parameter in parameters_of(model)}


def _draw(parameter: Parameter, generator: np.random.Generator) -> Array:
    match parameter.initial:
        case Initial.FACTOR:
            return np.asarray(generator.uniform(0.5, 1.5, parameter.shape))
        case Initial.OFFSET:
            return generator.uniform(-0.5, 0.5, parameter.shape)
        case Initial.UNIT_OFFSET:
            return _with_positive_first(generator.uniform(-0.5, 0.5, parameter.shape))
        case Initial.TABLE:
            return generator.standard_normal(parameter.shape)
    weight = generator.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
    return _with_positive_first(weight) if parameter.initial is Initial.UNIT_WEIGHT else weight


def _with_positive_first(values: Array) -> Array:
    """Values whose first row is not negative.

    The first unit of each layer, for the first row of each microbatch, then rarely dies in a ReLU: a small network in which no
    unit is alive has no gradient, and proves nothing.
    """
    values[0] = np.abs(values[0])
    return values


def _draw_step(training: Training, generator: np.random.Generator) -> tuple[Batch, ...]:
    batches = tuple(_draw_batch(training, rows, generator) for rows in training.data.microbatches)
    if isinstance(training.loss, CrossEntropy):
        batches = _counted(training.loss, training.model.outputs, batches, generator)
    return tuple(_laid(batch, training.data.batch_dim) for batch in batches)


def _draw_batch(training: Training, rows: int, generator: np.random.Generator) -> Batch:
    model, dtype = training.model, np.dtype(training.precision.value)
    shape = (rows,) if model.length is None else (rows, model.length)
    if model.source is None:
        inputs = torch.from_numpy(_with_positive_first(generator.standard_normal((*shape, model.features))).astype(dtype))
    else:
        inputs = torch.from_numpy(generator.integers(0, model.source.vocabulary, shape))
    if isinstance(training.loss, CrossEntropy):
        targets = torch.from_numpy(generator.integers(0, model.outputs, shape))
    else:
        targets = torch.from_numpy(generator.standard_normal((*shape, model.outputs)).astype(dtype))
    masks = tuple(_draw_mask(model, index, rows, generator, dtype) for index in range(len(model.layers)))
    return Batch(inputs=inputs, targets=targets, masks=masks)


def _counted(loss: CrossEntropy, classes: int, batches: tuple[Batch, ...], generator: np.random.Generator) -> tuple[Batch, ...]:
    """The batches of a step with `IGNORED` for labels that do not count, and what the loss is divided by."""
    kept = [_draw_counts(loss, number, batch, generator) for number, batch in enumerate(batches)]
    if not any(counts.any() for counts in kept):
        kept[-1].flat[-1] = True
    targets = [batch.targets.masked_fill(torch.from_numpy(~counts), IGNORED) for batch, counts in zip(batches, kept, strict=True)]
    divisor = 1.0 if loss.summed else sum(count_labels(loss, classes, labels) for labels in targets)
    return tuple(replace(batch, targets=labels, divisor=divisor) for batch, labels in zip(batches, targets, strict=True))


def count_labels(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> float:
    """How many labels count, or what they count together where classes have weights."""
    counted = labels[labels != IGNORED]
    return float(class_weights(classes, torch.float64)[counted].sum()) if loss.class_weights else float(counted.numel())


def _draw_counts(loss: CrossEntropy, number: int, batch: Batch, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Which labels of a microbatch count."""
    shape, rows = tuple(batch.targets.shape), batch.rows
    if loss.ignored is Ignored.SOME:
        return generator.random(shape) >= IGNORED_SHARE
    counts = np.ones(shape, dtype=np.bool_)
    if loss.ignored is Ignored.FIRST_ROWS:
        counts[: rows // 2] = False
    if loss.ignored is Ignored.FIRST_MICROBATCH and number == 0:
        counts[:] = False
    return counts


def class_weights(classes: int, dtype: torch.dtype) -> torch.Tensor:
    """What the labels of each class count, shape (classes,)."""
    return torch.linspace(0.5, 1.5, classes, dtype=dtype)


def _laid(batch: Batch, batch_dim: int) -> Batch:
    """The same batch with its rows along a dim."""
    if batch_dim == 0:
        return batch
    inputs, targets = (values.transpose(0, 1).contiguous() for values in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, batch_dim=batch_dim)


def _draw_mask(
    model: Model, index: int, rows: int, generator: np.random.Generator, dtype: np.dtype[np.floating]
) -> torch.Tensor | None:
    layer = model.layers[index]
    shape = kind_of(layer).mask(layer, model.inputs(index), model.length)
    if shape is None:
        return None
    kept = generator.random((rows, *shape)) >= layer.dropout
    kept.flat[0] = True
    return torch.from_numpy((kept / (1.0 - layer.dropout)).astype(dtype))
