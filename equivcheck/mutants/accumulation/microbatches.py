"""Faults in gradient accumulation and loss normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import DATA_PARALLEL, has_data_ranks, has_microbatches
from equivcheck.mutants.rank import data_rank, data_ranks, num_microbatches
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP1, Scenario, ZeroGrad
from equivcheck.training.accumulate import microbatch_loss, scalar_value
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.stage import Stage

ACCUMULATES = ("ddp", "replicate", "fsdp1", "fsdp2", "spmd", "fsdp2 x tensor_parallel")
"""Layouts whose ranks accumulate gradients themselves. In a pipeline, the schedule accumulates."""


def _averages(scenario: Scenario) -> bool:
    return has_microbatches(scenario) and scenario.training.loss.is_mean


def _is_uneven(scenario: Scenario) -> bool:
    return _averages(scenario) and len(set(scenario.training.data.microbatches)) > 1


def has_microbatches_of_ranks(scenario: Scenario) -> bool:
    """Whether several ranks accumulate several microbatches."""
    return has_microbatches(scenario) and has_data_ranks(scenario)


def _weigh(setup: Setup, weight: Callable[[int], float]) -> None:
    """Weight each microbatch's gradients by `weight(number)`; the reported loss stays correct."""
    setup.compute = partial(_accumulate, weight)


def _accumulate(weight: Callable[[int], float], setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
    """Copy of `accumulate` with weights."""
    total = 0.0
    for number, batch in enumerate(microbatches):
        setup.announce(Stage.COMPUTE, index)
        with setup.accumulation(number == len(microbatches) - 1):
            loss = microbatch_loss(setup, setup.take(batch), index, batch.rows)
            (loss * weight(number)).backward()  # type: ignore[no-untyped-call]
        setup.announce(Stage.READING, index)
        total += scalar_value(loss)
    return total


@fault(layouts=ACCUMULATES, applies=_averages, causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED), minimum=ONE_RANK)
def microbatches_summed(setup: Setup) -> None:
    """Bug: microbatch means are summed, but not divided by their number."""
    data = setup.training.data
    _weigh(setup, lambda number: data.batch / data.microbatches[number])


@fault(
    layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.RESCALED_EACH_MICROBATCH, Cause.AVERAGED_TWICE), minimum=ONE_RANK
)
def microbatches_averaged_twice(setup: Setup) -> None:
    """Bug: gradients are divided twice by the number of microbatches."""
    count = num_microbatches(setup)
    _weigh(setup, lambda _number: 1.0 / count)


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.RESCALED_EACH_MICROBATCH,), minimum=ONE_RANK)
def rescaled_each_microbatch(setup: Setup) -> None:
    """Bug: accumulated gradients are divided by the number of microbatches after each one."""
    count = num_microbatches(setup)
    _weigh(setup, lambda number: float(count) ** (number + 1 - count))


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.MICROBATCH_LOST,), minimum=ONE_RANK)
def only_last_microbatch(setup: Setup) -> None:
    """Bug: gradients are zeroed before each microbatch, so only the last one counts."""
    last = num_microbatches(setup) - 1
    _weigh(setup, lambda number: float(number == last))


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.MICROBATCH_LOST,), minimum=ONE_RANK)
def only_first_microbatch(setup: Setup) -> None:
    """Bug: only the first microbatch's gradients count."""
    _weigh(setup, lambda number: float(number == 0))


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.MICROBATCH_LOST,), minimum=ONE_RANK)
def last_microbatch_lost(setup: Setup) -> None:
    """Bug: the last microbatch counts in the loss, but not in the gradients."""
    last = num_microbatches(setup) - 1
    _weigh(setup, lambda number: float(number != last))


@fault(layouts=DATA_PARALLEL, applies=has_microbatches_of_ranks, causes=(Cause.ROWS_LOST, Cause.MICROBATCH_LOST))
def last_microbatch_lost_on_one_rank(setup: Setup) -> None:
    """Bug: the last rank leaves out its last microbatch's gradients."""
    if data_rank(setup) == data_ranks(setup) - 1:
        last_microbatch_lost(setup)


@fault(layouts=ACCUMULATES, applies=_is_uneven, causes=(Cause.MEAN_OF_MEANS,), minimum=ONE_RANK)
def mean_of_means(setup: Setup) -> None:
    """Bug: microbatch means are averaged with equal weights, although microbatches have different sizes."""
    data, count = setup.training.data, num_microbatches(setup)
    _weigh(setup, lambda number: data.batch / data.microbatches[number] / count)


def _sums_over_ranks(scenario: Scenario) -> bool:
    return has_data_ranks(scenario) and not scenario.training.loss.is_mean


def waits_for_last(scenario: Scenario) -> bool:
    """Whether several ranks reduce gradients only at the last microbatch."""
    # FSDP1 keeps unsharded gradients meanwhile, and raises if it finds them at the update.
    waits = any(getattr(parallelism, "no_sync", False) for parallelism in scenario.layout.parallelisms)
    sharded = any(layout.has(FSDP1) for layout in scenario.layouts)
    return has_microbatches_of_ranks(scenario) and waits and not sharded


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.MICROBATCH_LOST, Cause.ROWS_LOST), minimum=ONE_RANK)
def same_microbatch(setup: Setup) -> None:
    """Bug: the first microbatch is used for all, as if the data loader never advanced."""
    inner = setup.compute
    setup.compute = lambda altered, microbatches, index: inner(altered, [microbatches[0]] * len(microbatches), index)


@fault(layouts=("ddp", "replicate", "fsdp1", "fsdp2"), applies=_sums_over_ranks, causes=(Cause.AVERAGED_TWICE, Cause.SCALED))
def sum_averaged_over_ranks(setup: Setup) -> None:
    """Bug: a sum loss is not multiplied by the number of ranks, although gradients are averaged."""
    setup.loss_scale /= data_ranks(setup)


@fault(
    layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel"),
    applies=waits_for_last,
    # With sharded parameters, unreduced gradients reach no shard, so a microbatch is lost.
    causes=(Cause.NOT_REDUCED, Cause.MICROBATCH_LOST),
)
def reduced_after_first_microbatch(setup: Setup) -> None:
    """Bug: gradients are reduced after the first microbatch, so later microbatches stay unreduced."""
    inner, count = setup.accumulation, num_microbatches(setup)
    seen = 0

    def accumulation(_last: bool) -> AbstractContextManager[object]:
        nonlocal seen
        seen += 1
        return inner(seen % count == 1)

    setup.accumulation = accumulation


@fault(
    layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.STEPPED_EACH_MICROBATCH, Cause.MICROBATCH_LOST), minimum=ONE_RANK
)
def stepped_each_microbatch(setup: Setup) -> None:
    """Bug: the optimizer steps after each microbatch and zeroes its gradients."""
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
