"""Changes that context parallelism makes to a rank's inputs, loss and gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.parallelisms.context_parallel.ranks import PositionRanks
from equivcheck.scenario import Loss, Training
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.layers.sequence import Sequence
from equivcheck.training.material import Batch
from equivcheck.training.model import MLP
from equivcheck.training.setup import Setup


def set_sequence(setup: Setup, sequence: Sequence) -> None:
    """Give `sequence` to the model and all its layers. It says which positions this rank has."""
    for module in setup.model.modules():
        if isinstance(module, (LayerModule, MLP)):
            module.sequence = sequence


def take_positions(setup: Setup, ranks: PositionRanks) -> None:
    """Select this rank's positions in inputs, targets and dropout masks, before inner parallelisms select their rows."""
    inner = setup.take
    setup.take = lambda batch: inner(positions_of(batch, ranks.own))


def positions_of(batch: Batch, positions: torch.Tensor) -> Batch:
    """Return a batch of sequences with only these positions."""
    dim = 1 - batch.batch_dim
    inputs, targets = (values.index_select(dim, positions) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.index_select(1, positions) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


_SUMMED = {Loss.MSE_MEAN: Loss.MSE_SUM, Loss.LINEAR_MEAN: Loss.LINEAR_SUM}


def shard_loss(setup: Setup, ranks: PositionRanks) -> None:
    """Change a mean loss so that each rank computes its part of the mean over all positions.

    Ranks may have unequal numbers of positions. A cross-entropy needs no change, because it already divides by the whole step's
    label count.
    """
    inner, training = setup.loss, setup.training
    if not isinstance(training.loss, Loss) or not training.loss.is_mean:
        return
    summed = replace(training, loss=_SUMMED[training.loss])

    def loss(_training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        rows = outputs.shape[training.data.batch_dim]
        return inner(summed, outputs, targets, divisor) / (rows * ranks.length * outputs.shape[2:].numel())

    setup.loss = loss


def sum_gradients_over_ranks(setup: Setup, ranks: PositionRanks) -> None:
    """Sum each parameter's gradient over ranks after a step's last backward, and sum the reported loss."""
    inner = setup.full_loss
    setup.full_loss = lambda loss: _summed(inner(loss), ranks.group)
    setup.before_update.append(lambda _optimizer, _step: gradients_by_hand.sum_gradients(setup.model.parameters(), ranks.group))


def _summed(loss: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)
