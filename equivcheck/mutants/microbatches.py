"""Microbatches that count for more or less than they should, or at another time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from equivcheck.mutants.axes import data_rank, data_ranks
from equivcheck.scenario import ZeroGrad
from equivcheck.trace.stage import Stage
from equivcheck.train.accumulate import part_loss, scalar
from equivcheck.train.material import Batch
from equivcheck.train.setup import Setup

Weight = Callable[[Setup, int], float]
"""What the gradient of a microbatch is multiplied by; told its number."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """Let gradients of microbatches count otherwise, while the loss stays right; called with the setup of a rank."""

    weight: Weight
    """How much each counts, 1 where it is right."""

    def __call__(self, setup: Setup) -> None:
        """Plant it."""
        setup.compute = partial(_accumulate, self.weight)


def _accumulate(weight: Weight, setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    """As `accumulate` does, but for the weights."""
    total = 0.0
    for number, batch in enumerate(microbatches):
        setup.announce(Stage.COMPUTE, index)
        with setup.accumulation(number == len(microbatches) - 1):
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            (loss * weight(setup, number)).backward()  # type: ignore[no-untyped-call]
        setup.announce(Stage.READING, index)
        total += scalar(loss)
    return total


def summed(setup: Setup, number: int) -> float:
    """As much as if it were the whole batch."""
    data = setup.training.data
    return data.batch / data.microbatches[number]


def equal(setup: Setup, number: int) -> float:
    """As much as the others, whatever its rows."""
    return summed(setup, number) / _count(setup)


def divided_again(setup: Setup, _number: int) -> float:
    """Divided by the number of microbatches once more."""
    return 1.0 / _count(setup)


def divided_by_later(setup: Setup, number: int) -> float:
    """Divided by the number of microbatches at each one that follows."""
    return float(_count(setup)) ** (number + 1 - _count(setup))


def last_only(setup: Setup, number: int) -> float:
    """Only if it is the last."""
    return float(number == _count(setup) - 1)


def first_only(_setup: Setup, number: int) -> float:
    """Only if it is the first."""
    return float(number == 0)


def but_last(setup: Setup, number: int) -> float:
    """Only if it is not the last."""
    return 1.0 - last_only(setup, number)


def but_last_on_last_rank(setup: Setup, number: int) -> float:
    """Only if it is not the last on the last rank."""
    return but_last(setup, number) if data_rank(setup) == data_ranks(setup) - 1 else 1.0


def _count(setup: Setup) -> int:
    return len(setup.training.data.microbatches)


def repeat_first(setup: Setup) -> None:
    """Compute on the first microbatch as often as there are any."""
    inner = setup.compute
    setup.compute = lambda altered, microbatches, index: inner(altered, [microbatches[0]] * len(microbatches), index)


def average_sum(setup: Setup) -> None:
    """Leave out the number of ranks by which a summed loss is to be multiplied, as gradients are averaged."""
    setup.loss_scale /= data_ranks(setup)


def reduce_after_first(setup: Setup) -> None:
    """Reduce gradients after the first microbatch rather than after the last."""
    inner, count = setup.accumulation, _count(setup)
    seen = 0

    def accumulation(_last: bool) -> AbstractContextManager[object]:
        nonlocal seen
        seen += 1
        return inner(seen % count == 1)

    setup.accumulation = accumulation


def step_at_each(setup: Setup) -> None:
    """Update and zero gradients after each microbatch."""
    inner, latest = setup.compute, list[torch.optim.Optimizer]()
    setup.before_step.append(lambda optimizer, _index: latest.append(optimizer))

    def compute(altered: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        total = inner(altered, microbatches[:1], index) or 0.0
        for batch in microbatches[1:]:
            altered.update(latest[-1])
            latest[-1].zero_grad(set_to_none=altered.training.zero_grad is ZeroGrad.NONE)
            total += inner(altered, [batch], index) or 0.0
        return total

    setup.compute = compute
