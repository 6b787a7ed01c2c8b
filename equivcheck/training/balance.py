"""Load-balancing loss for layers that route positions to experts.

The fraction of positions routed to each expert is taken over a whole microbatch, because a part would give another loss. The rest
is a mean over rows, so a rank has its partial sum. A layer may take the fraction over each sequence instead. Its loss is a mean
over rows, and only ranks with other positions of the same sequences sum counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from equivcheck.training.layers.module import LayerModule, RoutingLoad
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP

Counts = Sequence[torch.Tensor]
"""For each layer with a load-balancing loss, the number of positions routed to each expert.

The shape is (experts,), or (rows, experts) if the layer counts in each sequence.
"""


def is_per_sequence(counts: torch.Tensor) -> bool:
    """Whether a layer's counts belong to single sequences, not to a microbatch."""
    return counts.ndim > 1


def routing_loads(model: nn.Module) -> list[RoutingLoad]:
    """Return the routing statistics from the last forward, one entry for each layer with a load-balancing loss."""
    found = (module.load() for module in model.modules() if isinstance(module, LayerModule))
    return [load for load in found if load is not None]


def counts_of_microbatch(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
    """Return the number of tokens for each expert in each layer, over the full microbatch or each sequence of `batch`.

    `counts` contains these numbers for `batch`. If `batch` is only this rank's part of a microbatch, the full microbatch is
    routed again, as in step `index`.
    """
    if batch.whole is None or all(map(is_per_sequence, counts)):
        return counts
    return of_microbatch_or_sequence(counts, routing_counts(model, batch.whole, index))


def of_microbatch_or_sequence(own: Counts, full: Counts) -> Counts:
    """Return the counts of a full microbatch, but those of `own` rows for layers that count in each sequence."""
    return [mine if is_per_sequence(mine) else every for mine, every in zip(own, full, strict=True)]


def routing_counts(model: nn.Module, batch: Batch, index: int) -> Counts:
    """Route a batch at step `index`, without gradients, and return the tokens per expert in each layer."""
    assert isinstance(model, MLP), "the model is a stack"
    with torch.no_grad():
        model.through_layers(batch.inputs, batch.masks, index)
    return [load.counts for load in routing_loads(model)]


def balance_loss(loads: Sequence[RoutingLoad], counts: Counts, positions: int) -> torch.Tensor:
    """Add up all layers' load-balancing losses.

    `loads` contains the routing statistics for this rank's rows. `counts` are the tokens per expert, and `positions` the number
    of positions, in the full microbatch.
    """
    return torch.stack(list(_losses(loads, counts))).sum() / positions


def _losses(loads: Sequence[RoutingLoad], counts: Counts) -> Iterator[torch.Tensor]:
    for load, chosen in zip(loads, counts, strict=True):
        yield load.balance * chosen.shape[-1] * (chosen / chosen.sum(-1, keepdim=True) * load.shares).sum()
