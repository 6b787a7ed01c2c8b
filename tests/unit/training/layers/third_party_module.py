"""Module for the third-party layer kind."""

from __future__ import annotations

import torch

from equivcheck.training.layers.module import LayerModule, UninitializedLinear
from unit.training.layers.third_party import LowRank


class LowRankModule(LayerModule):
    """Two linears with few features between them."""

    def __init__(self, layer: LowRank, in_features: int) -> None:
        super().__init__(layer)
        self.narrow, self.wide = (
            UninitializedLinear(in_features, layer.rank, bias=False),
            UninitializedLinear(layer.rank, in_features, bias=False),
        )

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map (..., features) to the same shape."""
        return self.finish(self.wide(self.narrow(inputs)), mask, inputs)
