"""Loss functions."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.layers.module import replicated_like
from equivcheck.training.material import IGNORED, class_weights


def loss_of(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """Apply a loss to outputs and targets. Cross-entropy is divided by `divisor`."""
    loss = training.loss
    if isinstance(loss, CrossEntropy):
        return cross_entropy(loss, outputs, targets) / divisor
    if loss.is_linear:
        difference = outputs - targets
        return difference.mean() if loss.is_mean else difference.sum()
    return functional.mse_loss(outputs, targets, reduction="mean" if loss.is_mean else "sum")


def cross_entropy(loss: CrossEntropy, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over labels that are not ignored, for logits (..., classes) and labels (...)."""
    logits, flat = outputs.flatten(0, -2), labels.flatten()
    weight = replicated_like(logits, class_weights(logits.shape[-1], logits.dtype)) if loss.class_weights else None
    total = functional.cross_entropy(
        logits, flat, weight=weight, ignore_index=IGNORED, reduction="sum", label_smoothing=loss.label_smoothing
    )
    if loss.z_loss:
        total = total + loss.z_loss * (logits.logsumexp(-1).square() * (flat != IGNORED)).sum()
    return total
