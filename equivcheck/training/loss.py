"""Loss functions."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.labels import IGNORED, class_weights, labels_of, weights_of
from equivcheck.training.layers.module import replicated_like


def loss_of(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """Compute the training's loss. A cross-entropy is a sum over labels, divided by `divisor`."""
    loss = training.loss
    if isinstance(loss, CrossEntropy):
        return cross_entropy(loss, outputs, targets) / divisor
    if loss.is_linear:
        difference = outputs - targets
        return difference.mean() if loss.is_mean else difference.sum()
    return functional.mse_loss(outputs, targets, reduction="mean" if loss.is_mean else "sum")


def cross_entropy(loss: CrossEntropy, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy over all labels except ignored ones.

    Labels have the shape (...), and `outputs` are logits with the shape (..., classes). If labels have weights, each label's
    cross-entropy is multiplied by its weight.
    """
    logits, flat, weights = outputs.flatten(0, -2), labels_of(targets).flatten(), weights_of(targets)
    by_class = replicated_like(logits, class_weights(logits.shape[-1], logits.dtype)) if loss.class_weights else None
    total = functional.cross_entropy(
        logits,
        flat,
        weight=by_class,
        ignore_index=IGNORED,
        reduction="sum" if weights is None else "none",
        label_smoothing=loss.label_smoothing,
    )
    total = total if weights is None else (total * weights.flatten()).sum()
    if loss.z_loss:
        counts = flat != IGNORED if weights is None else (flat != IGNORED) * weights.flatten()
        total = total + loss.z_loss * (logits.logsumexp(-1).square() * counts).sum()
    return total
