"""The auxiliary loss of layers whose units are to be chosen alike, such as experts.

How often units are chosen is counted over a whole microbatch, whoever computes its rows: what a part of the rows chooses gives
another loss. The rest is a mean over rows, of which a rank has its addend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from equivcheck.training.layers.module import LayerModule, Load
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP

Counts = Sequence[torch.Tensor]
"""Of each layer that has such a loss, how often each unit is chosen."""


def loads_of(model: nn.Module) -> list[Load]:
    """How the last forward has loaded layers, of those that have a loss of their own."""
    found = (module.load() for module in model.modules() if isinstance(module, LayerModule))
    return [load for load in found if load is not None]


def own_counts(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
    """Those of a batch, or of the microbatch that it is a part of."""
    return counts if batch.whole is None else counts_in(model, batch.whole, index)


def counts_in(model: nn.Module, batch: Batch, index: int) -> Counts:
    """What layers choose in a batch at a step."""
    assert isinstance(model, MLP), "the model is a stack"
    with torch.no_grad():
        model.through_layers(batch.inputs, batch.masks, index)
    return [load.counts for load in loads_of(model)]


def balance_loss(loads: Sequence[Load], counts: Counts, positions: int) -> torch.Tensor:
    """The sum of the losses of layers, by counts of a whole microbatch, with means over so many positions."""
    return torch.stack(list(_losses(loads, counts))).sum() / positions


def _losses(loads: Sequence[Load], counts: Counts) -> Iterator[torch.Tensor]:
    for load, chosen in zip(loads, counts, strict=True):
        yield load.balance * chosen.numel() * (chosen / chosen.sum() * load.shares).sum()
