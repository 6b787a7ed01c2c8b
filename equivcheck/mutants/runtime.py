"""Runtime faults: one rank leaves the common path, or results are read too early."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from equivcheck.mutants.comm_hooks import AverageWithoutWaiting, reduce_with
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import (
    EVERYWHERE,
    all_of,
    has_data_ranks,
    has_ranks,
    is_eager,
    layouts_with,
    reduces_all_by_hooks,
    wraps_the_model,
)
from equivcheck.mutants.rank import around_update
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, Replicate
from equivcheck.training.setup import Setup


def _is_odd_one_out() -> bool:
    """Whether this is rank 1, which gets the fault."""
    return dist.get_rank() == 1


@fault(layouts=layouts_with(DDP.tag), applies=all_of(has_data_ranks, wraps_the_model), causes=(Cause.CALLS_DIFFER,))
def rank_skips_reduction(setup: Setup) -> None:
    """Bug: rank 1 takes a branch that skips the gradient reduction."""
    module = setup.module
    if isinstance(module, DistributedDataParallel) and _is_odd_one_out():
        setup.accumulation = lambda _last: module.no_sync()


@fault(layouts=EVERYWHERE, applies=has_ranks, causes=(Cause.CALLS_DIFFER,))
def rank_reduces_once_more(setup: Setup) -> None:
    """Bug: rank 1 takes a branch that issues one extra collective."""
    if _is_odd_one_out():
        setup.before_update.append(lambda _optimizer, _step: dist.all_reduce(torch.zeros(1)))


@fault(layouts=EVERYWHERE, applies=has_ranks, causes=(Cause.CALLS_DIFFER,))
def rank_swaps_calls(setup: Setup) -> None:
    """Bug: rank 1 issues two collectives in the opposite order."""
    values = torch.zeros(1), torch.zeros(2)
    calls: list[Callable[[], object]] = [lambda: dist.all_reduce(values[0]), lambda: dist.broadcast(values[1], src=0)]
    if _is_odd_one_out():
        calls.reverse()

    def issue(_optimizer: Optimizer, _step: int) -> None:
        for call in calls:
            call()

    setup.before_update.append(issue)


@fault(
    layouts=tuple(name for name in layouts_with(DDP.tag, Replicate.tag) if name != "replicate x pipeline"),
    applies=all_of(is_eager, reduces_all_by_hooks),
    causes=(Cause.READ_BEFORE_DONE,),
)
def read_before_done(setup: Setup) -> None:
    """Bug: averaged gradients are read before their asynchronous all-reduce has finished."""
    unawaited = AverageWithoutWaiting()
    reduce_with(setup, unawaited)
    around_update(setup, before=lambda _optimizer: unawaited.wait())


@fault(layouts=EVERYWHERE, applies=has_ranks, causes=(Cause.RANK_FAILED,))
def rank_raises(setup: Setup) -> None:
    """Bug: rank 1 raises, and the other ranks wait for it."""
    if _is_odd_one_out():
        setup.before_update.append(_raise)


def _raise(_optimizer: Optimizer, step: int) -> None:
    raise RuntimeError(f"rank 1 fails on purpose before the update of step {step}")


@fault(layouts=EVERYWHERE, applies=has_ranks, causes=(Cause.NOT_UPDATED, Cause.RANKS_DISAGREE, Cause.CALLS_DIFFER))
def rank_skips_update(setup: Setup) -> None:
    """Bug: rank 1 skips its optimizer updates."""
    if _is_odd_one_out():
        setup.update = lambda _optimizer: None
