"""A second reference, independent of torch and of the train loop: what checks the reference itself.

Nothing is shared with `equivcheck.training` but the nouns. It computes in the element type of the arrays that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivcheck.scenario import ClipNorm, ClipValue, CrossEntropy, Loss, NormType, Training, ZeroGrad
from equivcheck.scenario.clipping import Clipping
from numpy_reference.labels import label_loss
from numpy_reference.layers import Array
from numpy_reference.model import backward, forward
from numpy_reference.optimizer import NumpyOptimizer

CLIP_EPS = 1e-6
"""What torch adds to the norm that it divides by when it clips."""

Gradients = dict[str, Array | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NumpyBatch:
    """One microbatch."""

    inputs: Array
    """Shape (rows, features), or (features, rows) where the training's batch dim is 1."""
    targets: Array | npt.NDArray[np.int64]
    """Shape (rows, outputs), or (outputs, rows); labels, negative where they do not count, have shape (rows,)."""
    masks: tuple[Array | None, ...]
    """Per layer, the scaled dropout mask of shape (rows, width); None for a layer without dropout."""
    counted: float = 1.0
    """What labels of the whole step count, classes weighed; 1 where the loss is not divided by them."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NumpyStep:
    """What one step leaves."""

    loss: float
    """The loss of the step's whole batch, before the update."""
    gradients: Gradients
    """By canonical name, before clipping; None where there is none."""
    clip_norm: float | None
    """Norm of all gradients before clipping; None without clipping by norm."""
    clipped: Gradients | None
    """Gradients after clipping; None without clipping."""
    parameters: dict[str, Array]
    """After the update."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NumpyTrace:
    """What a whole run leaves."""

    steps: tuple[NumpyStep, ...]
    """One a step."""


def numpy_train(training: Training, parameters: Mapping[str, Array], steps: Sequence[Sequence[NumpyBatch]]) -> NumpyTrace:
    """Train from initial parameters by canonical name on each step's microbatches; nothing given is written to.

    Raises `UsageError` for an optimizer other than SGD, Adam and AdamW.
    """
    optimizer = NumpyOptimizer(training, parameters)
    current, gradients = dict(parameters), dict.fromkeys(parameters, None)
    kept: list[NumpyStep] = []
    for index, microbatches in enumerate(steps):
        loss, gradients = _accumulate(training, current, _zeroed(training, gradients), microbatches, index)
        norm, clipped = _clip(training.clipping, gradients)
        current = optimizer.update(current, gradients if clipped is None else clipped, index)
        kept.append(NumpyStep(loss=loss, gradients=gradients, clip_norm=norm, clipped=clipped, parameters=current))
    return NumpyTrace(steps=tuple(kept))


def _zeroed(training: Training, gradients: Mapping[str, Array | None]) -> Gradients:
    zeroed: Gradients = dict.fromkeys(gradients, None)
    if training.zero_grad is ZeroGrad.ZERO:
        zeroed |= {name: np.zeros_like(values) for name, values in gradients.items() if values is not None}
    return zeroed


def _accumulate(
    training: Training, parameters: Mapping[str, Array], gradients: Gradients, microbatches: Sequence[NumpyBatch], index: int
) -> tuple[float, Gradients]:
    """The loss of a step, and its gradients added to those given."""
    total, gradients = 0.0, dict(gradients)
    rows = sum(batch.inputs.shape[training.data.batch_dim] for batch in microbatches)
    for batch in microbatches:
        inputs, targets = (batch.inputs.T, batch.targets.T) if training.data.batch_dim else (batch.inputs, batch.targets)
        run = forward(training.model, parameters, inputs, batch.masks, index)
        loss, slope = _loss(training, run.outputs, targets, batch.counted, rows)
        total += loss
        for name, values in backward(run, parameters, slope).items():
            before = gradients[name]
            gradients[name] = values if before is None else before + values
    return total, gradients


def _loss(training: Training, outputs: Array, targets: Array, counted: float, rows: int) -> tuple[float, Array]:
    """A microbatch's share of the step's loss, and its gradient; a mean is over the elements of all rows in the step."""
    if isinstance(training.loss, CrossEntropy):
        loss, slope = label_loss(training.loss, outputs, targets)
        return loss / counted, slope / counted
    errors = outputs - targets
    share = 1.0 / (rows * training.model.out_features) if training.loss in (Loss.MSE_MEAN, Loss.LINEAR_MEAN) else 1.0
    if training.loss in (Loss.LINEAR_MEAN, Loss.LINEAR_SUM):
        return float(errors.sum()) * share, np.full_like(errors, share)
    return float(np.square(errors).sum()) * share, 2.0 * share * errors


def _clip(clipping: Clipping | None, gradients: Gradients) -> tuple[float | None, Gradients | None]:
    """The norm before clipping, and the gradients after it."""
    if isinstance(clipping, ClipNorm):
        norm = _norm(clipping.norm_type, np.concatenate([values.ravel() for values in gradients.values() if values is not None]))
        factor = min(1.0, clipping.max_norm / (norm + CLIP_EPS))
        return norm, {name: None if values is None else values * factor for name, values in gradients.items()}
    if isinstance(clipping, ClipValue):
        limit = clipping.clip_value
        return None, {name: None if values is None else np.clip(values, -limit, limit) for name, values in gradients.items()}
    return None, None


def _norm(kind: NormType, values: Array) -> float:
    match kind:
        case NormType.ONE:
            return float(np.abs(values).sum())
        case NormType.TWO:
            return float(np.sqrt(np.square(values).sum()))
        case NormType.INF:
            return float(np.abs(values).max())
