"""Linear layer as a module and as functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from equivcheck.scenario import AuxiliaryLinear, Layer
from equivcheck.training.layers.linear.shape_ops import SHAPE_OPS
from equivcheck.training.layers.module import ACTIVATIONS, Function, LayerModule, UninitializedLinear, norm_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerFunctions:
    """A linear layer's parts as functions, to compute it without a `Block`. A part that the layer does not have is None."""

    layer: Layer
    norm: Function | None
    linear: Function
    auxiliary: Function | None
    activation: Function | None
    shape_op: Function | None


def layer_output(block: Block | LayerFunctions, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
    """Compute a linear layer. Inputs have shape (rows, inputs), and outputs have shape (rows, width).

    Inputs and outputs may have model copies along an additional dim 0.
    """
    normed = inputs if block.norm is None else block.norm(inputs)
    outputs: torch.Tensor = block.linear(normed)
    if block.auxiliary is not None and block.layer.auxiliary is AuxiliaryLinear.EVEN_STEPS and step % 2 == 0:
        outputs = outputs + block.auxiliary(normed)
    if block.activation is not None:
        outputs = block.activation(outputs)
    if mask is not None:
        outputs = outputs * mask
    if block.layer.residual:
        outputs = outputs + inputs
    return outputs if block.shape_op is None else block.shape_op(outputs)


class Block(LayerModule):
    """Module for a linear layer with norm, activation, dropout, residual and an auxiliary linear."""

    layer: Layer

    def __init__(self, layer: Layer, in_features: int) -> None:
        super().__init__(layer)
        self.norm = norm_of(layer.norm, in_features)
        self.linear = UninitializedLinear(in_features, layer.width, bias=layer.bias)
        self.auxiliary = None if layer.auxiliary is None else UninitializedLinear(in_features, layer.width, bias=False)
        self.activation = ACTIVATIONS.get(layer.activation)
        self.shape_op = None if layer.shape_op is None else SHAPE_OPS[layer.shape_op]

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Compute the layer with `layer_output`."""
        return layer_output(self, inputs, mask, step)
