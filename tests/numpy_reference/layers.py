"""Activations and normalisations in NumPy, each with its derivative written out by hand; no torch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from equivcheck.scenario import Activation, Norm

Array = npt.NDArray[np.floating]

LAYER_NORM_EPS = 1e-5
"""What `torch.nn.LayerNorm` adds to the variance; `torch.nn.RMSNorm` adds the element type's eps to the mean square."""

_erf = np.vectorize(math.erf, otypes=[np.float64])


def activate(activation: Activation, values: Array) -> Array:
    """The activation, elementwise."""
    match activation:
        case Activation.RELU:
            return np.maximum(values, 0.0)
        case Activation.GELU:
            return values * _normal_cdf(values)
        case Activation.TANH:
            return np.tanh(values)
        case Activation.SIGMOID:
            return _sigmoid(values)
        case Activation.SILU:
            return values * _sigmoid(values)
        case Activation.IDENTITY:
            return values


def slope(activation: Activation, values: Array) -> Array:
    """The activation's derivative, elementwise; 0 where ReLU has none."""
    match activation:
        case Activation.RELU:
            return (values > 0.0).astype(values.dtype)
        case Activation.GELU:
            return _normal_cdf(values) + values * np.exp(-np.square(values) / 2.0) / math.sqrt(2.0 * math.pi)
        case Activation.TANH:
            return 1.0 - np.square(np.tanh(values))
        case Activation.SIGMOID:
            return _sigmoid(values) * _sigmoid(-values)
        case Activation.SILU:
            return _sigmoid(values) * (1.0 + values * _sigmoid(-values))
        case Activation.IDENTITY:
            return np.ones_like(values)


def normalise(norm: Norm, values: Array) -> tuple[Array, Array]:
    """Normalise (rows, features) over the features, without weights; also the factor of each row, shape (rows, 1)."""
    if norm is Norm.LAYER:
        values = values - values.mean(axis=1, keepdims=True)
    eps = LAYER_NORM_EPS if norm is Norm.LAYER else float(np.finfo(values.dtype).eps)
    factor = 1.0 / np.sqrt(np.mean(np.square(values), axis=1, keepdims=True) + eps)
    return values * factor, factor


def normalise_backward(norm: Norm, gradient: Array, normed: Array, factor: Array) -> Array:
    """The gradient of what was normalised, from that of the result and from what `normalise` gave."""
    gradient = gradient - normed * np.mean(gradient * normed, axis=1, keepdims=True)
    if norm is Norm.LAYER:
        # The adjoint of taking the mean out of the input; `normed` has no mean, so the order does not matter.
        gradient = gradient - gradient.mean(axis=1, keepdims=True)
    return gradient * factor


def _normal_cdf(values: Array) -> Array:
    # The dtype is kept: np.vectorize computes in float64.
    result: Array = (0.5 * (1.0 + _erf(values / math.sqrt(2.0)))).astype(values.dtype)
    return result


def _sigmoid(values: Array) -> Array:
    result: Array = np.exp(-np.logaddexp(0.0, -values))
    return result
