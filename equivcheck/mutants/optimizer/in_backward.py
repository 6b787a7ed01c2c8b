"""Updates by hooks during backward, at the wrong time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from equivcheck.layouts.base.execution.in_backward import update_in_backward
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import has_microbatches, is_eager, reduces_by_hooks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, Scenario
from equivcheck.training.setup import Setup


def _has_own_updates(scenario: Scenario) -> bool:
    shares = any(parallelism.zero_redundancy for layout in scenario.layouts for parallelism in layout.of(DDP))
    return reduces_by_hooks(scenario) and is_eager(scenario) and not shares and scenario.resume is None


@fault(layouts=("ddp", "replicate"), applies=_has_own_updates, causes=(Cause.NOT_REDUCED,))
def updated_before_reduction(setup: Setup) -> None:
    """Bug: hooks update parameters during backward, before `DistributedDataParallel` reduces their gradients."""
    update_in_backward(setup)


def _updates_early(scenario: Scenario) -> bool:
    early = all(layout.execution.optimizer_in_backward for layout in scenario.layouts)
    return early and is_eager(scenario) and has_microbatches(scenario)


@fault(
    layouts=("fsdp2", "spmd", "fsdp2 x tensor_parallel"),
    applies=_updates_early,
    causes=(Cause.STEPPED_EACH_MICROBATCH, Cause.MICROBATCH_LOST),
    minimum=ONE_RANK,
    during_backward=True,
)
def updated_in_each_backward(setup: Setup) -> None:
    """Bug: hooks update parameters during the backward of each microbatch, not only of the last one."""
    inner = setup.accumulation

    def accumulation(_last: bool) -> AbstractContextManager[object]:
        return inner(True)

    setup.accumulation = accumulation
