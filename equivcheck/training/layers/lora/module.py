"""Module for a linear with a LoRA adapter."""

from __future__ import annotations

import torch

from equivcheck.scenario import LoRALinear
from equivcheck.training.layers.module import LayerModule, UninitializedLinear


class LoRAModule(LayerModule):
    """Linear, to whose output a low-rank product of two further linears is added."""

    layer: LoRALinear

    def __init__(self, layer: LoRALinear, in_features: int) -> None:
        super().__init__(layer)
        self.base = UninitializedLinear(in_features, in_features, bias=False)
        self.lora_a = UninitializedLinear(in_features, layer.rank, bias=False)
        self.lora_b = UninitializedLinear(layer.rank, in_features, bias=False)
        self.scale = layer.scale

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:  # noqa: ARG002 - of the base
        """Compute the layer. Output and input have the same shape: (rows, features) or (rows, length, features)."""
        return self.finish(self.base(inputs) + self.scale * self.lora_b(self.lora_a(inputs)), mask, inputs)
