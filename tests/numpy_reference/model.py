"""The model's forward and backward in NumPy, written out by hand; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.scenario import AuxiliaryLinear, Layer, Model, Norm, ShapeOp
from numpy_reference.layers import Array, activate, normalise, normalise_backward, slope


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Kept:
    """What a layer's forward leaves for its backward."""

    normed: Array
    """Normalised input without the norm's weights (the input itself without a norm), shape (rows, inputs)."""
    factor: Array | None
    """What each row was multiplied by to normalise it, shape (rows, 1); None without a norm."""
    fed: Array
    """Input of the linear, shape (rows, inputs)."""
    linear: Array
    """Input of the activation, shape (rows, width)."""


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The model on one microbatch."""

    model: Model
    step: int
    masks: Sequence[Array | None]
    kept: tuple[_Kept, ...]
    outputs: Array
    """Shape (rows, outputs)."""
    unscaled: Array
    """What the scale multiplies, if the model has one; of the same shape."""


def forward(model: Model, parameters: Mapping[str, Array], inputs: Array, masks: Sequence[Array | None], step: int) -> Forward:
    """Map (rows, features) to (rows, outputs) and keep what `backward` needs."""
    kept = []
    for index, (layer, mask) in enumerate(zip(model.layers, masks, strict=True)):
        kept.append(_linear_forward(model, parameters, index, inputs, step))
        outputs = activate(layer.activation, kept[-1].linear)
        if mask is not None:
            outputs = outputs * mask
        inputs = _shape_op(layer, outputs + inputs if layer.residual else outputs)
    outputs = inputs * parameters["scale"] if model.scale else inputs
    if model.offset:
        outputs = outputs + np.linspace(0.25, 0.75, model.out_features, dtype=inputs.dtype)
    return Forward(model, step, masks, tuple(kept), outputs, inputs)


def backward(run: Forward, parameters: Mapping[str, Array], gradient: Array) -> dict[str, Array]:
    """Gradients by canonical name from that of the outputs; no entry for a parameter that is frozen or did not take part."""
    found: dict[str, Array] = {}
    if run.model.scale:
        found["scale"] = np.asarray((gradient * run.unscaled).sum())
        gradient = gradient * parameters["scale"]
    for index in reversed(range(len(run.model.layers))):
        through, gradients = _layer_backward(run, parameters, index, gradient)
        gradient = gradient + through if run.model.layers[index].residual else through
        for name, values in gradients.items():
            if is_trained(run.model, name):
                found[name] = found[name] + values if name in found else values
    return found


def is_trained(model: Model, name: str) -> bool:
    """Whether the parameter of that canonical name requires a gradient."""
    return name == "scale" or not model.layers[int(name.split(".")[1])].frozen


def _weight_name(model: Model, index: int) -> str:
    shares = model.layers[index].shares
    return f"layers.{index if shares is None else shares}.linear.weight"


def _auxiliary_runs(layer: Layer, step: int) -> bool:
    return layer.auxiliary is AuxiliaryLinear.EVEN_STEPS and step % 2 == 0


def _linear_forward(model: Model, parameters: Mapping[str, Array], index: int, inputs: Array, step: int) -> _Kept:
    layer, prefix = model.layers[index], f"layers.{index}"
    normed, factor = (inputs, None) if layer.norm is None else normalise(layer.norm, inputs)
    fed = normed * parameters[f"{prefix}.norm.weight"] if layer.norm is not None else normed
    if layer.norm is Norm.LAYER:
        fed = fed + parameters[f"{prefix}.norm.bias"]
    linear = fed @ parameters[_weight_name(model, index)].T
    if layer.bias:
        linear = linear + parameters[f"{prefix}.linear.bias"]
    if _auxiliary_runs(layer, step):
        linear = linear + fed @ parameters[f"{prefix}.auxiliary.weight"].T
    return _Kept(normed=normed, factor=factor, fed=fed, linear=linear)


def _shape_op(layer: Layer, values: Array) -> Array:
    """What the layer's shape operation makes of its output; its derivative is one everywhere."""
    if layer.shape_op is ShapeOp.ARANGE:
        return values + np.linspace(0.0, (layer.width - 1) / 8, layer.width, dtype=values.dtype)
    return values + 1.0 if layer.shape_op is ShapeOp.ONES else values


def _layer_backward(run: Forward, parameters: Mapping[str, Array], index: int, gradient: Array) -> tuple[Array, dict[str, Array]]:
    """The gradient of the layer's input but for the residual, and those of its parameters."""
    layer, kept, mask, prefix = run.model.layers[index], run.kept[index], run.masks[index], f"layers.{index}"
    if mask is not None:
        gradient = gradient * mask
    gradient = gradient * slope(layer.activation, kept.linear)
    weight = _weight_name(run.model, index)
    found: dict[str, Array] = {weight: gradient.T @ kept.fed}
    through = gradient @ parameters[weight]
    if layer.bias:
        found[f"{prefix}.linear.bias"] = gradient.sum(axis=0)
    if _auxiliary_runs(layer, run.step):
        found[f"{prefix}.auxiliary.weight"] = gradient.T @ kept.fed
        through = through + gradient @ parameters[f"{prefix}.auxiliary.weight"]
    if layer.norm is None or kept.factor is None:
        return through, found
    found[f"{prefix}.norm.weight"] = (through * kept.normed).sum(axis=0)
    if layer.norm is Norm.LAYER:
        found[f"{prefix}.norm.bias"] = through.sum(axis=0)
    through = through * parameters[f"{prefix}.norm.weight"]
    return normalise_backward(layer.norm, through, kept.normed, kept.factor), found
