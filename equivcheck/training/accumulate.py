"""Accumulate losses and gradients over a step's microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from equivcheck.training.balance import balance_loss, routing_loads
from equivcheck.training.layers.module import replicated_like
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.training.update.router_bias import count_choices
from equivcheck.worlds.trace.stage import Stage


def accumulate(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    """Run forward and backward for each microbatch in step `index`. Return the sum of this rank's scaled losses."""
    total = 0.0
    for number, batch in enumerate(microbatches):
        setup.announce(Stage.COMPUTE, index)
        with setup.accumulation(number == len(microbatches) - 1):
            loss = microbatch_loss(setup, setup.take(batch), index, batch.rows)
            backward(setup, loss)
        setup.announce(Stage.READING, index)
        total += scalar_value(loss)
    return total


def microbatch_loss(setup: Setup, batch: Batch, index: int, rows: int) -> torch.Tensor:
    """Run forward for a microbatch, or this rank's part of it, and return the scaled loss.

    The loss of step `index` is the sum of the scaled losses over microbatches, averaged over ranks. `rows` is the size of the
    full microbatch.
    """
    training = setup.training
    with setup.forward_context():
        outputs = setup.parts[0](batch.inputs, batch.masks, index)
        if training.model.has_router_bias:
            count_choices(setup.model)
        loss = setup.loss(training, outputs.to(getattr(torch, training.precision.value)), batch.targets, batch.divisor)
        loss = scale_loss(setup, loss, rows, index)
        return _with_balance(setup, loss, batch, index, rows / training.rows_at(index)) if training.model.balances else loss


def _with_balance(setup: Setup, loss: torch.Tensor, batch: Batch, index: int, share: float) -> torch.Tensor:
    loads = routing_loads(setup.model)
    counts = setup.full_counts(setup.model, [load.counts for load in loads], batch, index)
    added = balance_loss(loads, counts, batch.rows * (setup.training.model.length or 1)) * share
    return loss + (added if isinstance(added, DTensor) else replicated_like(loss, added))


def backward(setup: Setup, loss: torch.Tensor) -> None:
    """Run backward, with the loss scaled by `Setup.gradient_scale`."""
    (loss if setup.gradient_scale == 1.0 else loss * setup.gradient_scale).backward()  # type: ignore[no-untyped-call]


def scale_loss(setup: Setup, loss: torch.Tensor, rows: int, index: int) -> torch.Tensor:
    """Scale the loss on `rows` rows, so that the sum over microbatches is the step's loss. `index` is the step."""
    training = setup.training
    share = rows / training.rows_at(index) if training.loss.is_mean else setup.loss_scale
    return loss if share == 1.0 else loss * share


def scalar_value(value: torch.Tensor) -> float:
    """Return a scalar tensor as a float. A partial DTensor is reduced over ranks first."""
    return float(full_value(value))


def full_value(value: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the full value: a DTensor's full tensor, or the tensor itself."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
