"""Microbatches read, reduced or stepped at the wrong time, and averaged sum losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from equivcheck.mutants.accumulation.weights import ACCUMULATES, has_microbatches_of_ranks
from equivcheck.mutants.mutant import ONE_RANK, TWO_RANKS, fault
from equivcheck.mutants.needs import has_data_ranks, has_microbatches
from equivcheck.mutants.rank import data_ranks, num_microbatches
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP1, Scenario, ZeroGrad
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def _sums_over_ranks(scenario: Scenario) -> bool:
    return has_data_ranks(scenario) and not scenario.training.loss.is_mean


def _waits_for_last(scenario: Scenario) -> bool:
    # FSDP1 keeps unsharded gradients meanwhile, and raises if it finds them at the update.
    waits = any(getattr(parallelism, "no_sync", False) for parallelism in scenario.layout.parallelisms)
    sharded = any(layout.has(FSDP1) for layout in scenario.layouts)
    return has_microbatches_of_ranks(scenario) and waits and not sharded


@fault(layouts=ACCUMULATES, applies=has_microbatches, causes=(Cause.MICROBATCH_LOST, Cause.ROWS_LOST), minimum=ONE_RANK)
def same_microbatch(setup: Setup) -> None:
    """The first microbatch is used for all, as if the data loader never advanced."""
    inner = setup.compute
    setup.compute = lambda altered, microbatches, index: inner(altered, [microbatches[0]] * len(microbatches), index)


@fault(
    layouts=("ddp", "replicate", "fsdp1", "fsdp2"),
    applies=_sums_over_ranks,
    causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
    minimum=TWO_RANKS,
)
def sum_averaged_over_ranks(setup: Setup) -> None:
    """A sum loss is not multiplied by the number of ranks, although gradients are averaged."""
    setup.loss_scale /= data_ranks(setup)


@fault(
    layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel"),
    applies=_waits_for_last,
    # With sharded parameters, unreduced gradients reach no shard, so a microbatch is lost.
    causes=(Cause.NOT_REDUCED, Cause.MICROBATCH_LOST),
    minimum=TWO_RANKS,
)
def reduced_after_first_microbatch(setup: Setup) -> None:
    """Gradients are reduced after the first microbatch, so later microbatches stay unreduced."""
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
    """The optimizer steps after each microbatch and zeroes its gradients."""
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
