"""Module for a gated MLP."""

from __future__ import annotations

import torch

from equivcheck.scenario import GatedMLP
from equivcheck.training.layers.module import ACTIVATIONS, LayerModule, UninitializedLinear, norm_of


class GatedMLPModule(LayerModule):
    """Gated MLP: the outputs of gate and up projections are multiplied, and a down projection follows."""

    layer: GatedMLP

    def __init__(self, layer: GatedMLP, in_features: int) -> None:
        super().__init__(layer)
        self.norm = norm_of(layer.norm, in_features)
        self.gate = UninitializedLinear(in_features, layer.hidden, bias=layer.bias)
        self.up = UninitializedLinear(in_features, layer.hidden, bias=layer.bias)
        self.down = UninitializedLinear(layer.hidden, in_features, bias=layer.bias)
        self.activation = ACTIVATIONS.get(layer.activation)

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:  # noqa: ARG002 - of the base
        """Compute the layer. Output and input have the same shape: (rows, features) or (rows, length, features)."""
        normed = inputs if self.norm is None else self.norm(inputs)
        gate = self.gate(normed) if self.activation is None else self.activation(self.gate(normed))
        return self.finish(self.down(gate * self.up(normed)), mask, inputs)
