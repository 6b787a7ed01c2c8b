"""The loss of outputs beside targets or labels, as its noun says."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.layers.module import beside
from equivcheck.training.material import IGNORED, class_weights


def loss_of(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """The loss noun applied to outputs and targets; a loss of labels is divided by what those of the step count."""
    loss = training.loss
    if isinstance(loss, CrossEntropy):
        return cross_entropy(loss, outputs, targets) / divisor
    if loss.is_linear:
        difference = outputs - targets
        return difference.mean() if loss.is_mean else difference.sum()
    return functional.mse_loss(outputs, targets, reduction="mean" if loss.is_mean else "sum")


def cross_entropy(loss: CrossEntropy, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over labels that count, of outputs (..., classes) beside labels (...)."""
    logits, flat = outputs.flatten(0, -2), labels.flatten()
    weight = beside(logits, class_weights(logits.shape[-1], logits.dtype)) if loss.class_weights else None
    total = functional.cross_entropy(
        logits, flat, weight=weight, ignore_index=IGNORED, reduction="sum", label_smoothing=loss.label_smoothing
    )
    if loss.z_loss:
        total = total + loss.z_loss * (logits.logsumexp(-1).square() * (flat != IGNORED)).sum()
    return total
