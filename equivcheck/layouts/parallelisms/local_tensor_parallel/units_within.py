"""Layers whose units are cut within, as experts are by the features between their linears.

Every rank routes alike, and has some features of every unit, of which each position's output is a sum over ranks: once a layer,
whatever its units are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.layouts.parallelisms.local_tensor_parallel.routes import Route
from equivcheck.training.layers.region import Region


class LocalRegion(Region):
    """Where this rank computes an addend."""

    def __init__(self, ranks: AxisRanks, enter: Route, use: Route, leave: Route) -> None:
        self.ranks, self.enter, self.use, self.leave = ranks, enter, use, leave

    def entered(self, values: torch.Tensor) -> torch.Tensor:
        """As inherited."""
        return self.ranks.move(values, self.enter)

    def used(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As inherited."""
        return self.ranks.move(values, self.use), self.ranks.move(weights, self.use)

    def left(self, addend: torch.Tensor) -> torch.Tensor:
        """As inherited."""
        return self.ranks.move(addend, self.leave)

    def added_once(self, bias: torch.Tensor) -> torch.Tensor:
        """As inherited."""
        return self.ranks.added_once(bias)


def cut_within(layer: Any, region: LocalRegion, dims: Mapping[str, int]) -> None:
    """Leave a rank its part of those parameters of a layer that have a dim here, and have it compute an addend."""
    layer.region = region
    for name, dim in dims.items():
        owner, _, attribute = name.rpartition(".")
        module = layer.get_submodule(owner)
        module.region = region
        setattr(module, attribute, region.ranks.own_parameter(getattr(module, attribute), dim))
