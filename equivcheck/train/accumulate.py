"""Losses and gradients of a step, accumulated over its microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from equivcheck.layers.module import beside
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.trace.stage import Stage
from equivcheck.train.material import IGNORED, Batch, class_weights
from equivcheck.train.setup import Setup


def accumulate(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    """Forward and backward of one microbatch after the other; returns the step's loss."""
    total = 0.0
    for number, batch in enumerate(microbatches):
        setup.announce(Stage.COMPUTE, index)
        with setup.accumulation(number == len(microbatches) - 1):
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            backward(setup, loss)
        setup.announce(Stage.READING, index)
        total += scalar(loss)
    return total


def part_loss(setup: Setup, batch: Batch, index: int, rows: int) -> torch.Tensor:
    """The loss of a microbatch, scaled so that the sum over microbatches and the mean over ranks is the step's loss."""
    training = setup.training
    with setup.around_forward():
        outputs = setup.module(batch.inputs, batch.masks, index)
        loss = loss_of(training, outputs.to(getattr(torch, training.precision.value)), batch.targets, batch.divisor)
    return scaled(setup, loss, rows)


def backward(setup: Setup, loss: torch.Tensor) -> None:
    """Leave the gradients of a loss, or of so many times the loss as the setup asks for."""
    (loss if setup.gradient_scale == 1.0 else loss * setup.gradient_scale).backward()  # type: ignore[no-untyped-call]


def scaled(setup: Setup, loss: torch.Tensor, rows: int) -> torch.Tensor:
    """The loss of so many of the step's rows as a part of the step's loss."""
    training = setup.training
    share = rows / training.data.batch if training.loss.is_mean else setup.loss_scale
    return loss if share == 1.0 else loss * share


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


def scalar(value: torch.Tensor) -> float:
    """The full value of a scalar tensor, reduced over ranks first if it is a DTensor with a pending sum."""
    return float(whole(value))


def whole(value: torch.Tensor) -> torch.Tensor:
    """The full value as a plain tensor."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
