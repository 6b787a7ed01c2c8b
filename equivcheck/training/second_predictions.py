"""Change labels or weights for the second prediction, in trainings whose head predicts two tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.labels import change_weights, count_labels, label_weights, labels_of, weigh_predictions, with_weights
from equivcheck.training.material import Batch

LabelsOf = Callable[[torch.Tensor], torch.Tensor]
"""Computes labels of the second prediction from those of the first, (rows, length)."""


def relabel_second(training: Training, second: LabelsOf, batches: Sequence[Batch]) -> list[Batch]:
    """Replace the labels for the head's second prediction, and compute weights and divisor again.

    `second` computes these labels from the labels for the first prediction.
    """
    loss, classes, dim = _loss_of(training), training.model.out_features, training.data.batch_dim
    first = [labels_of(batch.targets)[..., 0].transpose(0, dim) for batch in batches]
    labels = [torch.stack((each, second(each)), -1) for each in first]
    weights = weigh_predictions(loss, classes, labels)
    dtype = getattr(torch, training.precision.value)
    targets = [with_weights(each, weight.to(dtype)) for each, weight in zip(labels, weights, strict=True)]
    count = 1.0 if loss.summed else sum(count_labels(loss, classes, each) for each in targets) or 1.0
    return [
        replace(batch, targets=each.transpose(0, dim).contiguous(), divisor=count)
        for batch, each in zip(batches, targets, strict=True)
    ]


def weigh_second_as_first(training: Training, batches: Sequence[Batch]) -> list[Batch]:
    """Give each label for the head's second prediction the weight of the label for the first prediction."""
    loss, classes = _loss_of(training), training.model.out_features

    def weigh(labels: torch.Tensor) -> torch.Tensor:
        return label_weights(loss, classes, labels[..., 0]).unsqueeze(-1).expand_as(labels)

    return [replace(batch, targets=change_weights(batch.targets, batch.batch_dim, weigh)) for batch in batches]


def _loss_of(training: Training) -> CrossEntropy:
    assert isinstance(training.loss, CrossEntropy), "only token models predict two tokens"
    return training.loss
