"""What context parallelism changes of a rank's training: what it takes, its loss, its gradients."""

from __future__ import annotations

from collections.abc import Sequence as Several
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


def look_from(setup: Setup, sequence: Sequence) -> None:
    """Tell the model, and each layer, which positions are here."""
    for module in setup.model.modules():
        if isinstance(module, (LayerModule, MLP)):
            module.sequence = sequence


def take_positions(setup: Setup, ranks: PositionRanks) -> None:
    """Take the positions of this rank, of dropout masks too, as they are data; inner layouts take their part of that."""
    inner = setup.take
    setup.take = lambda batch: inner(positions_of(batch, ranks.own))


def positions_of(batch: Batch, positions: torch.Tensor) -> Batch:
    """Some positions of a batch of sequences."""
    dim = 1 - batch.batch_dim
    inputs, targets = (values.index_select(dim, positions) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.index_select(1, positions) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


_SUMMED = {Loss.MSE_MEAN: Loss.MSE_SUM, Loss.LINEAR_MEAN: Loss.LINEAR_SUM}


def own_loss(setup: Setup, ranks: PositionRanks) -> None:
    """Have a rank's loss be its addend of the loss of all positions: a mean over its own would weigh unequal parts alike.

    Losses of labels are sums over what the labels of the whole step count, in any case.
    """
    inner, training = setup.loss, setup.training
    if not isinstance(training.loss, Loss) or not training.loss.is_mean:
        return
    summed = replace(training, loss=_SUMMED[training.loss])

    def loss(_training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        rows = outputs.shape[training.data.batch_dim]
        return inner(summed, outputs, targets, divisor) / (rows * ranks.length * outputs.shape[-1])

    setup.loss = loss


def sum_over_ranks(setup: Setup, ranks: PositionRanks) -> None:
    """Sum gradients over ranks, parameter by parameter, once a step's last backward is through; and the loss that is reported."""
    inner = setup.compute

    def compute(setup: Setup, microbatches: Several[Batch], index: int) -> float | None:
        loss = inner(setup, microbatches, index)
        return None if loss is None else _summed(loss, ranks.group)

    setup.compute = compute
    setup.before_update.append(lambda _optimizer, _step: gradients_by_hand.sum_gradients(setup.model.parameters(), ranks.group))


def _summed(loss: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)
