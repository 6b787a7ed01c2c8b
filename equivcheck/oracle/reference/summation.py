"""Train on one device with sums in other orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from equivcheck.scenario import ClipNorm, Training
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import Batch, material
from equivcheck.worlds.trace.trace import Trace

SCALES = (3.0, 5.0)
"""Loss scales besides the number of parts. A power of two would not change any rounding."""


def split_traces(training: Training, num_parts: int) -> tuple[Trace, ...]:
    """Train on one device with microbatches split into parts, once for each of several loss scales."""
    return tuple(split_trace(training, num_parts, scale) for scale in (float(num_parts), *SCALES))


def split_trace(training: Training, num_parts: int, scale: float) -> Trace:
    """Train on one device with sums as in data parallelism: microbatches in equal parts, and one norm over all gradients.

    Losses are multiplied by `scale` and gradients divided by it, so the backward rounds differently. This changes gradients that
    cancel inside an operation. Examples are softmax, and a normalization layer if dropout left only one feature. Perturbed inputs
    do not change such gradients.
    """
    setup = single_device_setup(training)
    setup.clip_norm = clip_flat
    setup.gradient_scale = scale
    setup.before_update.append(partial(_divide, scale))
    return train(setup, split_steps(training, num_parts))


def split_steps(training: Training, num_parts: int) -> list[list[Batch]]:
    """Return the microbatches in each step, each split into `num_parts` equal parts."""
    looks = training.model.balances_microbatches
    return [[part for batch in step for part in _parts(batch, num_parts, looks=looks)] for step in material(training).steps]


def _divide(divisor: float, optimizer: torch.optim.Optimizer, _step: int) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad /= divisor


def clip_flat(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Clip gradients by one norm over all of them, and return the norm before clipping."""
    gradients = [parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(gradients), float(clipping.norm_type.value))
    nn.utils.clip_grads_with_norm_(parameters, clipping.max_norm, norm)
    return norm


def wide_norm_trace(training: Training) -> Trace:
    """Train on one device with the gradient norm summed in the widest floating-point type.

    Only this shows the error in the reference's own norm: a sum over many equal terms always errs to the same side.
    """
    setup = single_device_setup(training)
    setup.clip_norm = clip_by_wide_norm
    return train(setup)


def clip_by_wide_norm(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Clip by a norm that is summed in the widest floating-point type, and return the norm before clipping."""
    gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    values = np.concatenate([gradient.double().numpy().ravel() for gradient in gradients]).astype(np.longdouble)
    exact = np.linalg.norm(values, float(clipping.norm_type.value))
    norm = torch.tensor(float(exact), dtype=gradients[0].dtype)
    nn.utils.clip_grads_with_norm_(parameters, clipping.max_norm, norm)
    return norm


def _parts(batch: Batch, num_parts: int, *, looks: bool) -> Iterator[Batch]:
    inputs, targets = (values.chunk(num_parts, batch.batch_dim) for values in (batch.inputs, batch.targets))
    for part, rows in enumerate(inputs):
        masks = tuple(None if mask is None else mask.chunk(num_parts)[part] for mask in batch.masks)
        yield replace(batch, inputs=rows, targets=targets[part], masks=masks, whole=batch if looks else None)
