"""The cross-entropy of labels in NumPy: the sum over those that count, and its gradient; no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from equivcheck.scenario import CrossEntropy, Normaliser
from numpy_reference.layers import Array

ROW_WEIGHTS = (0.5, 1.0, 1.5)


def _share(loss: CrossEntropy, sequence: npt.NDArray[np.int64], weights: Array) -> float:
    """Weight of a label by the labels that count in its sequence."""
    if loss.per is Normaliser.TOKEN or sequence.ndim == 0:
        return 1.0
    return 1.0 / sum(float(weights[label]) for label in sequence if label >= 0)


def count_of(loss: CrossEntropy, classes: int, targets: Array | npt.NDArray[np.int64]) -> float:
    """The sum of the weights of labels that are not negative, one after the other."""
    labels = targets[..., 0].astype(np.int64) if loss.weighs_labels else targets
    weights = np.linspace(0.5, 1.5, classes) if loss.class_weights else np.ones(classes)
    total = 0.0
    for place in np.ndindex(*labels.shape):
        if labels[place] >= 0:
            by_row = ROW_WEIGHTS[place[0] % 3] if loss.row_weights else 1.0
            total += float(weights[labels[place]]) * _share(loss, labels[place[0]], weights) * by_row
    return total


def label_loss(loss: CrossEntropy, outputs: Array, targets: Array | npt.NDArray[np.int64]) -> tuple[float, Array]:
    """The sum over labels that are not negative, one after the other, and its gradient.

    Outputs have shape (rows, ..., classes) and labels (rows, ...); the gradient is shaped as the outputs. Given weights are
    not read, but computed here.
    """
    labels = targets[..., 0].astype(np.int64) if loss.weighs_labels else targets
    classes, total, slope = outputs.shape[-1], 0.0, np.zeros_like(outputs)
    weights = np.linspace(0.5, 1.5, classes) if loss.class_weights else np.ones(classes)
    for place in np.ndindex(*labels.shape):
        row, label = outputs[place], labels[place]
        if label < 0:
            continue
        normaliser = float(np.log(np.exp(row - row.max()).sum()) + row.max())
        wanted = weights * loss.label_smoothing / classes
        wanted[label] += weights[label] * (1.0 - loss.label_smoothing)
        share = _share(loss, labels[place[0]], weights) * (ROW_WEIGHTS[place[0] % 3] if loss.row_weights else 1.0)
        total += share * (float(wanted @ (normaliser - row)) + loss.z_loss * normaliser**2)
        slope[place] = (wanted.sum() + 2.0 * loss.z_loss * normaliser) * np.exp(row - normaliser) - wanted
        slope[place] *= share
    return total, slope
