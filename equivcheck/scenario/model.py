"""The model of a training: a stack of linear layers, each with what real ones have around them."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.choice import Choice
from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import noun, refuse, require_between

MAX_LAYERS = 8
MAX_WIDTH = 32
MAX_DROPOUT = 0.9


class Activation(Choice):
    """The elementwise function after a linear."""

    IDENTITY = "identity"
    RELU = "relu"
    GELU = "gelu"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SILU = "silu"


class Norm(Choice):
    """The normalisation of a layer's input over its features."""

    LAYER = "layer"
    RMS = "rms"


class AuxiliaryLinear(Choice):
    """At which steps the auxiliary linear of a layer takes part."""

    NEVER = "never"
    EVEN_STEPS = "even_steps"


class ShapeOp(Choice):
    """What a layer does to its output last: an identity through other shapes, or the sum with what a factory function makes."""

    FLATTEN = "flatten"
    SQUEEZE = "squeeze"
    UNSQUEEZE = "unsqueeze"
    VIEW = "view"
    REPEAT = "repeat"
    ARANGE = "arange"
    ONES = "ones"
    ZEROS = "zeros"


ARANGE_STEP = 0.125
"""From one feature to the next, what `ShapeOp.ARANGE` adds more; from 0."""


@noun
class Layer:
    """One layer: ``shape_op(residual(dropout(activation(linear(norm(x)) + auxiliary(norm(x))))))``."""

    tag: ClassVar[str] = "linear"
    width: int
    """Output features, 1 to 32."""
    bias: bool = True
    """Whether the linear has a bias."""
    activation: Activation = Activation.IDENTITY
    """What follows the linear."""
    norm: Norm | None = None
    """What normalises the input, with learnt weights; None for nothing."""
    residual: bool = False
    """Whether the layer's input is added to its output; needs as many inputs as outputs."""
    dropout: float = 0.0
    """Probability of zeroing an output, 0 to 0.9; the mask belongs to the data: the same on one device and on many."""
    frozen: bool = False
    """Whether the parameters of this layer require no gradient; a shared weight belongs to the layer that first has it."""
    shares: int | None = None
    """Index of an earlier layer whose weight this one uses; None for its own."""
    auxiliary: AuxiliaryLinear | None = None
    """A second linear (no bias) whose output is added to the first's, never or at steps 0, 2, 4 ...; None for none."""
    shape_op: ShapeOp | None = None
    """What is done to the output last; None for nothing."""

    def __post_init__(self) -> None:
        require_between(self, "width", 1, MAX_WIDTH)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)


@noun
class Model:
    """A multi-layer perceptron."""

    features: int
    """Input features, 1 to 32."""
    layers: tuple[Layer, ...]
    """1 to 8 layers, at least one of them trained and with a weight of its own."""
    counter: bool = False
    """Whether the model has a buffer that counts its forward passes, as batch normalisation does."""
    offset: bool = False
    """Whether the model has a buffer of real numbers, one for each output, that is added to its outputs."""
    scale: bool = False
    """Whether a trained parameter of shape [] multiplies the outputs, before the offset, as a learnt temperature does."""

    def __post_init__(self) -> None:
        require_between(self, "features", 1, MAX_WIDTH)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidScenario(f"Model.layers has {len(self.layers)} layers; allowed: 1 to {MAX_LAYERS}")
        if all(layer.frozen or layer.shares is not None for layer in self.layers):
            raise InvalidScenario("Model.layers has no layer that is trained and has its own weight; allowed: at least one")
        for index in range(len(self.layers)):
            self._check_layer(index)

    def _check_layer(self, index: int) -> None:
        layer, inputs = self.layers[index], self.inputs(index)
        if layer.residual and layer.width != inputs:
            raise refuse(layer, "residual", f"only where inputs ({inputs}) equal width ({layer.width}), layer {index}")
        if layer.shares is None:
            return
        if not 0 <= layer.shares < index or self.layers[layer.shares].shares is not None:
            raise refuse(layer, "shares", f"an earlier layer with its own weight, layer {index}")
        if (layer.width, inputs) != (self.layers[layer.shares].width, self.inputs(layer.shares)):
            raise refuse(layer, "shares", f"a layer with the same inputs and width, layer {index}")

    def inputs(self, index: int) -> int:
        """Input features of the layer at `index`."""
        return self.layers[index - 1].width if index else self.features

    @property
    def has_matrices_only(self) -> bool:
        """Whether every parameter has two dims: no bias, no norm, no scale."""
        return not self.scale and not any(layer.bias or layer.norm is not None for layer in self.layers)

    @property
    def outputs(self) -> int:
        """Output features of the model."""
        return self.layers[-1].width
