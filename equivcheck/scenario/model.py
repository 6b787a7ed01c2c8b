"""The model of a training: a stack of layers, what it is fed, and what it ends in."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.layer_base import Activation, AnyLayer, AuxiliaryLinear, Norm, ShapeOp
from equivcheck.scenario.noun import noun, refuse, require_between
from equivcheck.scenario.token_layers import MAX_DROPOUT, MAX_LENGTH, Head, Tokens

MAX_LAYERS = 8
MAX_WIDTH = 32


ARANGE_STEP = 0.125
"""From one feature to the next, what `ShapeOp.ARANGE` adds more; from 0."""


@noun
class Layer(AnyLayer):
    """A linear layer: ``shape_op(residual(dropout(activation(linear(norm(x)) + auxiliary(norm(x))))))``."""

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

    @property
    def ends_in_linear(self) -> bool:
        """Whether nothing follows its linear."""
        plain = not (self.residual or self.dropout or self.shape_op)
        return plain and self.activation is Activation.IDENTITY

    def outputs(self, inputs: int) -> int:  # noqa: ARG002 - of the base class
        """Its width, whatever enters."""
        return self.width

    def refusal(self, inputs: int) -> tuple[str, str] | None:
        """A residual needs as many inputs as outputs."""
        if self.residual and self.width != inputs:
            return "residual", f"only where inputs ({inputs}) equal width ({self.width})"
        return None


@noun
class Model:
    """Layers one after the other: a multi-layer perceptron over rows of features, or a decoder over sequences of tokens."""

    features: int
    """Features that enter the first layer, 1 to 32: those of the data, or of the embedding of tokens."""
    length: int | None = None
    """Positions of a sequence, 1 to 16, where a row of the data is one; None where it is a single vector."""
    source: Tokens | None = None
    """What is embedded, for a model of tokens; None for one that is fed real numbers."""
    layers: tuple[AnyLayer, ...]
    """1 to 8 layers, at least one of them trained and with a weight of its own."""
    head: Head | None = None
    """What maps to a number for each token, last; None for nothing."""
    counter: bool = False
    """Whether the model has a buffer that counts its forward passes, as batch normalisation does."""
    offset: bool = False
    """Whether the model has a buffer of real numbers, one for each output, that is added to its outputs."""
    scale: bool = False
    """Whether a trained parameter of shape [] multiplies the outputs, before the offset, as a learnt temperature does."""

    def __post_init__(self) -> None:
        require_between(self, "features", 1, MAX_WIDTH)
        if self.length is not None:
            require_between(self, "length", 1, MAX_LENGTH)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidScenario(f"Model.layers has {len(self.layers)} layers; allowed: 1 to {MAX_LAYERS}")
        if all(layer.frozen or layer.shares is not None for layer in self.layers):
            raise InvalidScenario("Model.layers has no layer that is trained and has its own weight; allowed: at least one")
        for index in range(len(self.layers)):
            self._check_layer(index)
        self._check_tokens()

    def _check_layer(self, index: int) -> None:
        layer, inputs = self.layers[index], self.inputs(index)
        refusal = layer.refusal(inputs)
        if refusal is not None:
            field, allowed = refusal
            raise refuse(layer, field, f"{allowed}, layer {index}")
        if layer.needs_length and self.length is None:
            raise refuse(self, "length", f"1 to {MAX_LENGTH} with {type(layer).__name__}, layer {index}")
        if layer.shape_op is not None and self.length is not None:
            raise refuse(layer, "shape_op", f"None where rows are sequences, layer {index}")
        if layer.shares is None:
            return
        owner = self.layers[layer.shares] if 0 <= layer.shares < index else None
        if not isinstance(owner, Layer) or owner.shares is not None:
            raise refuse(layer, "shares", f"an earlier linear layer with its own weight, layer {index}")
        if (layer.outputs(inputs), inputs) != (owner.width, self.inputs(layer.shares)):
            raise refuse(layer, "shares", f"a layer with the same inputs and width, layer {index}")

    def _check_tokens(self) -> None:
        if self.source is not None and self.length is None:
            raise refuse(self, "length", f"1 to {MAX_LENGTH} with tokens")
        if self.head is not None and self.source is None:
            raise refuse(self, "head", "None without tokens")
        last = self.inputs(len(self.layers))
        if self.head is not None and self.head.tied and last != self.features:
            raise refuse(self.head, "tied", f"only where as many features ({last}) leave the layers as enter ({self.features})")

    def inputs(self, index: int) -> int:
        """Input features of the layer at `index`; past the last one, what leaves it."""
        features = self.features
        for layer in self.layers[:index]:
            features = layer.outputs(features)
        return features

    @property
    def widths(self) -> tuple[int, ...]:
        """Features that enter each layer, and last those that leave the last one."""
        return tuple(self.inputs(index) for index in range(len(self.layers) + 1))

    @property
    def linears(self) -> tuple[Layer, ...]:
        """Its layers where all are linear, none where some are not: for what runs no other kind."""
        found = tuple(layer for layer in self.layers if isinstance(layer, Layer))
        return found if len(found) == len(self.layers) else ()

    @property
    def balances(self) -> bool:
        """Whether a layer has a loss of its own."""
        return any(layer.balance for layer in self.layers)

    @property
    def has_matrices_only(self) -> bool:
        """Whether every parameter has two dims: no bias, no norm, no scale."""
        head = self.head is None or not (self.head.bias or self.head.norm)
        return not self.scale and head and all(layer.has_matrices_only for layer in self.layers)

    @property
    def outputs(self) -> int:
        """Output features of the model, of each position where rows are sequences."""
        if self.head is not None and self.source is not None:
            return self.source.vocabulary
        return self.inputs(len(self.layers))
