"""Labels and their weights in one tensor, the targets. Code that shards labels then shards their weights as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from equivcheck.scenario import CrossEntropy, Normaliser

Change = Callable[[torch.Tensor], torch.Tensor]
"""Function of labels."""

IGNORED = -100
"""Ignored label, torch's default `ignore_index`."""
_ROW_WEIGHTS = (0.5, 1.0, 1.5)
"""Weights of consecutive rows, repeated."""


def labels_of(targets: torch.Tensor) -> torch.Tensor:
    """Return the labels in `targets`. Weighted labels have a last dim with label and weight."""
    return targets[..., 0].round().long() if targets.is_floating_point() else targets


def weights_of(targets: torch.Tensor) -> torch.Tensor | None:
    """Return the weights in `targets`; None if labels have no weights."""
    return targets[..., 1] if targets.is_floating_point() else None


def change_labels(targets: torch.Tensor, change: Change) -> torch.Tensor:
    """Return targets with their labels replaced by ``change(labels)``. Weights stay the same."""
    labels, weights = change(labels_of(targets)), weights_of(targets)
    return labels if weights is None else with_weights(labels, weights)


def change_weights(targets: torch.Tensor, batch_dim: int, weigh: Change) -> torch.Tensor:
    """Return targets with new weights, computed from the labels by `weigh`.

    `weigh` gets and returns rows along dim 0. In `targets`, rows are along `batch_dim`.
    """
    labels = labels_of(targets)
    return with_weights(labels, weigh(labels.movedim(batch_dim, 0)).movedim(0, batch_dim).to(targets.dtype))


def with_weights(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Join labels and their weights to one tensor, the targets."""
    return torch.stack((labels.to(weights.dtype), weights), -1)


def class_weights(classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the class weights for a cross-entropy, shape (classes,)."""
    return torch.linspace(0.5, 1.5, classes, dtype=dtype)


def row_weights(rows: int) -> torch.Tensor:
    """Return the weights for the rows in a microbatch, shape (rows,)."""
    return torch.tensor(_ROW_WEIGHTS, dtype=torch.float64).repeat(-(-rows // len(_ROW_WEIGHTS)))[:rows]


def label_weights(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> torch.Tensor:
    """Return each label's weight in the shape of `labels`: its row's weight, or 1 if rows have no weights.

    For a mean per sequence, each weight is divided by the number of labels in its sequence that are not ignored. With class
    weights, it is divided by these labels' total class weight.
    """
    rows = row_weights(len(labels)) if loss.row_weights else torch.ones(len(labels), dtype=torch.float64)
    if loss.per is Normaliser.SEQUENCE:
        counts = _class_weights_of(loss, classes, labels).flatten(1).sum(1) if labels.dim() > 1 else torch.ones(len(labels))
        rows = rows / counts.where(counts > 0, 1.0)
    return rows.view(-1, *(1,) * (labels.dim() - 1)).expand_as(labels)


def labels_two_ahead(labels: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """Return the labels for predicting two tokens ahead. `labels` are those for the next token, with shape (rows, length).

    `boundaries` is a mask over positions with True at the last position of a document.
    """
    following = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), 1)
    return following.masked_fill(boundaries, IGNORED)


def weigh_predictions(loss: CrossEntropy, classes: int, labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return label weights for a head that predicts two tokens: a tensor with shape (rows, length, 2) for each microbatch.

    Unless the loss is a sum, the second prediction's weights are scaled, so that both predictions have the same total weight in a
    step.
    """
    weights = [torch.stack([label_weights(loss, classes, each) for each in batch.unbind(-1)], -1) for batch in labels]
    if not loss.summed:
        counted = zip(labels, weights, strict=True)
        counts = [(_class_weights_of(loss, classes, each) * weight).flatten(0, -2).sum(0) for each, weight in counted]
        first, second = torch.stack(counts).sum(0).tolist()
        for weight in weights:
            weight[..., 1] *= first / second if second else 0.0
    return weights


def count_labels(loss: CrossEntropy, classes: int, targets: torch.Tensor) -> float:
    """Return the number by which the loss is divided: a sum over all labels that are not ignored.

    Each label adds the weight of its class, multiplied by its own weight if `targets` has weights. Without any weights it adds 1.
    """
    counts, weights = _class_weights_of(loss, classes, labels_of(targets)), weights_of(targets)
    return float((counts if weights is None else counts * weights).sum())


def _class_weights_of(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> torch.Tensor:
    """Return the weight for each label's class; zero for ignored labels."""
    counted = (labels != IGNORED).double()
    return counted * class_weights(classes, torch.float64)[labels.clamp(min=0)] if loss.class_weights else counted
