"""The cross-entropy of labels in NumPy: the sum over those that count, and its gradient; no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from equivcheck.scenario import CrossEntropy
from numpy_reference.layers import Array


def label_loss(loss: CrossEntropy, outputs: Array, labels: npt.NDArray[np.int64]) -> tuple[float, Array]:
    """The sum over labels that are not negative, one after the other, and its gradient.

    Outputs have shape (..., classes) and labels (...); the gradient is shaped as the outputs.
    """
    classes, total, slope = outputs.shape[-1], 0.0, np.zeros_like(outputs)
    weights = np.linspace(0.5, 1.5, classes) if loss.class_weights else np.ones(classes)
    for place in np.ndindex(*labels.shape):
        row, label = outputs[place], labels[place]
        if label < 0:
            continue
        normaliser = float(np.log(np.exp(row - row.max()).sum()) + row.max())
        wanted = weights * loss.label_smoothing / classes
        wanted[label] += weights[label] * (1.0 - loss.label_smoothing)
        total += float(wanted @ (normaliser - row)) + loss.z_loss * normaliser**2
        slope[place] = (wanted.sum() + 2.0 * loss.z_loss * normaliser) * np.exp(row - normaliser) - wanted
    return total, slope
