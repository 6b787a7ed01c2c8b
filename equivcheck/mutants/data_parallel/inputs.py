"""Ranks with wrong rows, or with different initial weights or buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from equivcheck.mutants.comm_hooks import ddp_of
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import DATA_PARALLEL, has_data_ranks
from equivcheck.mutants.rank import data_rank, data_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.material import Batch
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup

TAKES_ROWS = (*DATA_PARALLEL, "spmd")
"""Layouts in which each rank selects its rows from the batch."""


def _has_offset(scenario: Scenario) -> bool:
    return has_data_ranks(scenario) and scenario.training.model.offset


@fault(layouts=TAKES_ROWS, applies=has_data_ranks, causes=(Cause.SAME_ROWS, Cause.ROWS_LOST))
def same_rows_everywhere(setup: Setup) -> None:
    """Bug: every rank reads the first rank's rows."""
    _take_rows_of(setup, 0)


@fault(layouts=TAKES_ROWS, applies=has_data_ranks, causes=(Cause.ROWS_LOST, Cause.SAME_ROWS))
def last_rows_lost(setup: Setup) -> None:
    """Bug: the last rank reads the previous rank's rows, so its own rows are lost."""
    _take_rows_of(setup, min(data_rank(setup), data_ranks(setup) - 2))


def _take_rows_of(setup: Setup, rank: int) -> None:
    """Let this rank compute on another data-parallel rank's rows."""
    count, inner = data_ranks(setup), setup.take
    setup.take = lambda batch: inner(_moved(batch, lambda values, dim: torch.cat([values.chunk(count, dim)[rank]] * count, dim)))


@fault(layouts=TAKES_ROWS, applies=has_data_ranks, causes=(Cause.ROWS_LOST, Cause.SAME_ROWS))
def shuffled_differently(setup: Setup) -> None:
    """Bug: each rank shuffles the batch differently, so some rows are read twice and others never."""
    inner, shift = setup.take, data_rank(setup)
    setup.take = lambda batch: inner(_moved(batch, lambda values, dim: values.roll(shift, dim)))


def _moved(batch: Batch, move: Callable[[torch.Tensor, int], torch.Tensor]) -> Batch:
    """Apply `move` to the rows in inputs, targets and masks."""
    inputs, targets = (move(values, batch.batch_dim) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else move(mask, 0) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


@fault(layouts=DATA_PARALLEL, applies=has_data_ranks, causes=(Cause.ROWS_LOST,))
def rank_left_out(setup: Setup) -> None:
    """Bug: the last rank's rows count in the loss, but its gradients are zero."""
    if data_rank(setup) == data_ranks(setup) - 1:
        setup.module.register_forward_hook(lambda _module, _inputs, outputs: _without_gradient(outputs))


def _without_gradient(outputs: torch.Tensor) -> torch.Tensor:
    outputs.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return outputs


@fault(layouts=DATA_PARALLEL, applies=has_data_ranks, causes=(Cause.UNEQUAL_START, Cause.RANKS_DISAGREE))
def weights_not_broadcast(setup: Setup) -> None:
    """Bug: ranks start with different weights, as if rank 0 did not broadcast them."""
    rank = data_rank(setup)
    with torch.no_grad():
        for parameter in setup.model.parameters():
            local_values(parameter).mul_(1.0 + 0.25 * rank)


@fault(layouts=DATA_PARALLEL, applies=_has_offset, causes=(Cause.UNEQUAL_START, Cause.RANKS_DISAGREE))
def buffers_not_broadcast(setup: Setup) -> None:
    """Bug: ranks have different buffers, as if rank 0 did not broadcast them."""
    module = ddp_of(setup)
    if module is not None:
        module.broadcast_buffers = False
    for name, buffer in setup.model.named_buffers():
        if name.endswith("offset"):
            buffer.add_(data_rank(setup))
