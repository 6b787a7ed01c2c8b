"""The module of a third party's kind of layer."""

from __future__ import annotations

import torch

from equivcheck.training.layers.module import LayerModule, Linear
from unit.training.layers.third_party import LowRank


class LowRankModule(LayerModule):
    """Two linears, one narrow."""

    def __init__(self, layer: LowRank, inputs: int) -> None:
        super().__init__(layer)
        self.narrow, self.wide = Linear(inputs, layer.rank, bias=False), Linear(layer.rank, inputs, bias=False)

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map features to as many."""
        return self.ended(self.wide(self.narrow(inputs)), mask, inputs)
