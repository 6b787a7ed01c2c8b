"""Faults in a trailing accumulation window: a last step with fewer microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from equivcheck.mutants.accumulation.microbatches import ACCUMULATES, waits_for_last
from equivcheck.mutants.mutant import WINDOW, Minimum, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, has_trailing_window, updates_exceed_rounding
from equivcheck.mutants.rank import num_microbatches, scale
from equivcheck.mutants.tokens.needs import is_divided
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def _has_divided_window(scenario: Scenario) -> bool:
    return has_trailing_window(scenario) and (scenario.training.loss.is_mean or is_divided(scenario))


@fault(layouts=EVERYWHERE, applies=_has_divided_window, causes=(Cause.TRAILING_WINDOW,), minimum=WINDOW)
def trailing_window_divided_as_full(setup: Setup) -> None:
    """Bug: the gradients of a trailing window are divided by the rows in a full window."""
    training, last = setup.training, setup.training.steps - 1
    factor = training.rows_at(last) / training.data.batch
    setup.before_update.append(lambda optimizer, step: scale(optimizer, factor) if step == last else None)


@fault(
    layouts=EVERYWHERE,
    applies=all_of(has_trailing_window, updates_exceed_rounding),
    causes=(Cause.TRAILING_WINDOW,),
    minimum=WINDOW,
)
def trailing_window_not_stepped(setup: Setup) -> None:
    """Bug: the optimizer does not step for a trailing window, because it waits for as many microbatches as in a full one."""
    inner, steps, last = setup.update, list[int](), setup.training.steps - 1
    setup.before_update.append(lambda _optimizer, step: steps.append(step))

    def update(optimizer: torch.optim.Optimizer) -> None:
        if steps[-1] != last:
            inner(optimizer)

    setup.update = update


@fault(
    layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel"),
    applies=all_of(has_trailing_window, waits_for_last),
    # With sharded parameters, unreduced gradients reach no shard.
    causes=(Cause.NOT_REDUCED, Cause.GRADIENT_LOST),
    minimum=Minimum(steps=2, because="the last of several steps has fewer microbatches, and one rank reduces nothing"),
)
def trailing_window_not_reduced(setup: Setup) -> None:
    """Bug: gradients are reduced at the last microbatch of a full window, which a trailing window does not reach."""
    inner, count = setup.accumulation, num_microbatches(setup)
    seen = 0

    def accumulation(_last: bool) -> AbstractContextManager[object]:
        nonlocal seen
        seen += 1
        return inner(seen % count == 0)

    setup.accumulation = accumulation


@fault(layouts=ACCUMULATES, applies=all_of(has_trailing_window, is_divided), causes=(Cause.LABEL_COUNT,), minimum=WINDOW)
def labels_of_first_window_counted(setup: Setup) -> None:
    """Bug: labels are counted in the first step only, and each later step divides by this number."""
    inner, divisors = setup.compute, list[float]()

    def compute(altered: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        divisors.append(microbatches[0].divisor)
        return inner(altered, [replace(batch, divisor=divisors[0]) for batch in microbatches], index)

    setup.compute = compute
