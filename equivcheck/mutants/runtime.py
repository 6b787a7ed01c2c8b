"""The runtime, wrong on purpose: a rank that goes another way, and results that are read too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import has_data_ranks, is_eager, reduces_by_hooks
from equivcheck.mutants.places import EVERYWHERE, both, within
from equivcheck.scenario import DDP, Replicate, Scenario
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from equivcheck.train.setup import Setup


def _is_odd_one_out() -> bool:
    """Whether this is rank 1, which is the one that goes another way."""
    import torch.distributed as dist

    return dist.get_rank() == 1


def skip_reduction(setup: Setup) -> None:
    """Let rank 1 leave out the reduction of its gradients."""
    from torch.nn.parallel import DistributedDataParallel

    module = setup.module
    if isinstance(module, DistributedDataParallel) and _is_odd_one_out():
        setup.accumulation = lambda _last: module.no_sync()


def reduce_once_more(setup: Setup) -> None:
    """Let rank 1 add up over all ranks what nobody else does, before its update."""
    import torch
    import torch.distributed as dist

    if _is_odd_one_out():
        setup.before_update.append(lambda _optimizer, _step: dist.all_reduce(torch.zeros(1)))


def swap_calls(setup: Setup) -> None:
    """Let rank 1 issue two calls in another order than other ranks."""
    import torch
    import torch.distributed as dist

    values = torch.zeros(1), torch.zeros(2)
    calls: list[Callable[[], object]] = [lambda: dist.all_reduce(values[0]), lambda: dist.broadcast(values[1], src=0)]
    if _is_odd_one_out():
        calls.reverse()

    def issue(_optimizer: Optimizer, _step: int) -> None:
        for call in calls:
            call()

    setup.before_update.append(issue)


def read_before_done(setup: Setup) -> None:
    """Read averaged gradients while they are on their way; wait only before they are used."""
    from equivcheck.mutants.reductions import Unawaited, reduce_by

    unawaited = Unawaited()
    reduce_by(setup, unawaited)
    update = setup.update

    def wait_and_update(optimizer: Optimizer) -> None:
        unawaited.wait()
        update(optimizer)

    setup.update = wait_and_update


def raise_before_update(setup: Setup) -> None:
    """Let rank 1 raise before its first update."""
    if _is_odd_one_out():
        setup.before_update.append(_raise)


def _raise(_optimizer: Optimizer, step: int) -> None:
    raise RuntimeError(f"rank 1 fails on purpose before the update of step {step}")


def skip_update(setup: Setup) -> None:
    """Let rank 1 leave out its updates, as if it alone had found gradients that are not finite."""
    if _is_odd_one_out():
        setup.update = lambda _optimizer: None


def _has_ranks(scenario: Scenario) -> bool:
    return scenario.layout.mesh.num_ranks > 1


_RANK_ONE = "the second rank is the one that differs"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="rank_skips_reduction",
        wrong="One rank takes a branch in which it does not reduce its gradients.",
        family=Family.RUNTIME,
        layouts=within(DDP.tag),
        applies=has_data_ranks,
        plant=skip_reduction,
        causes=(Cause.CALLS_DIFFER,),
        minimum=Minimum(because=_RANK_ONE),
    ),
    Mutant(
        name="rank_reduces_once_more",
        wrong="One rank takes a branch in which it issues a collective that no other does.",
        family=Family.RUNTIME,
        layouts=EVERYWHERE,
        applies=_has_ranks,
        plant=reduce_once_more,
        causes=(Cause.CALLS_DIFFER,),
        minimum=Minimum(because=_RANK_ONE),
    ),
    Mutant(
        name="rank_swaps_calls",
        wrong="One rank issues two collectives in another order than the others.",
        family=Family.RUNTIME,
        layouts=EVERYWHERE,
        applies=_has_ranks,
        plant=swap_calls,
        causes=(Cause.CALLS_DIFFER,),
        minimum=Minimum(because=_RANK_ONE),
    ),
    Mutant(
        name="read_before_done",
        wrong="Averaged gradients are read before the reduction that brings them is done.",
        family=Family.RUNTIME,
        layouts=within(DDP.tag, Replicate.tag),
        applies=both(is_eager, reduces_by_hooks),
        plant=read_before_done,
        causes=(Cause.READ_BEFORE_DONE,),
        minimum=Minimum(because="one rank has nothing to wait for"),
    ),
    Mutant(
        name="rank_raises",
        wrong="One rank raises, and the others wait for it.",
        family=Family.RUNTIME,
        layouts=EVERYWHERE,
        applies=_has_ranks,
        plant=raise_before_update,
        causes=(Cause.RANK_FAILED,),
        minimum=Minimum(because=_RANK_ONE),
    ),
    Mutant(
        name="rank_skips_update",
        wrong="One rank leaves out its updates.",
        family=Family.RUNTIME,
        layouts=EVERYWHERE,
        applies=_has_ranks,
        plant=skip_update,
        causes=(Cause.NOT_UPDATED, Cause.RANKS_DISAGREE, Cause.CALLS_DIFFER),
        minimum=Minimum(because=_RANK_ONE),
    ),
)
"""Every mutant of the family."""
