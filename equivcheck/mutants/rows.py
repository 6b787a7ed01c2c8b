"""Ranks that take other rows than their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from equivcheck.mutants.axes import data_rank, data_ranks
from equivcheck.train.material import Batch
from equivcheck.train.setup import Setup


@dataclass(frozen=True, slots=True)
class SharesOf:
    """Let each rank compute on the share of the rows that belongs to another; called with its setup."""

    owner: Callable[[int, int], int]
    """Whose share a rank takes; told its index among data ranks and their number."""

    def __call__(self, setup: Setup) -> None:
        """Plant it."""
        count, inner = data_ranks(setup), setup.take
        owner = self.owner(data_rank(setup), count)
        # All shares are replaced by the one: whatever the layout then takes is that.
        setup.take = lambda batch: inner(_moved(batch, lambda values, dim: _repeated(values, dim, owner, count)))


def first(_rank: int, _count: int) -> int:
    """The share of the first rank."""
    return 0


def but_the_last(rank: int, count: int) -> int:
    """Each its own, but the last that of the one before."""
    return min(rank, count - 2)


def shuffle_apart(setup: Setup) -> None:
    """Let each rank take its share of rows that are in another order than on other ranks."""
    inner, shift = setup.take, data_rank(setup)
    setup.take = lambda batch: inner(_moved(batch, lambda values, dim: values.roll(shift, dim)))


def _repeated(values: torch.Tensor, dim: int, share: int, count: int) -> torch.Tensor:
    return torch.cat([values.chunk(count, dim)[share]] * count, dim)


def _moved(batch: Batch, move: Callable[[torch.Tensor, int], torch.Tensor]) -> Batch:
    """The batch with rows of inputs, targets and masks moved alike."""
    inputs, targets = (move(values, batch.batch_dim) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else move(mask, 0) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)
