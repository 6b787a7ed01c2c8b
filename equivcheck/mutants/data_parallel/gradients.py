"""Gradients with a wrong divisor, or stale, lost or unreduced."""

from __future__ import annotations

from functools import partial

import torch

from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, fault
from equivcheck.mutants.needs import (
    DATA_PARALLEL,
    INNER_TENSOR_PARALLEL,
    WITH_DDP,
    all_of,
    has_data_ranks,
    has_steps,
    is_eager,
    reduces_by_hooks,
    updates_exceed_rounding,
)
from equivcheck.mutants.rank import around_update, data_ranks, optimizer_parameters, scale, scale_gradients, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario.mesh import TP
from equivcheck.training.setup import Setup


@fault(layouts=DATA_PARALLEL, applies=has_data_ranks, causes=(Cause.AVERAGED_TWICE, Cause.SCALED))
def averaged_twice(setup: Setup) -> None:
    """Bug: averaged gradients are divided again by the number of data-parallel ranks."""
    scale_gradients(setup, 1.0 / data_ranks(setup))


@fault(
    layouts=INNER_TENSOR_PARALLEL,
    applies=lambda scenario: is_eager(scenario) and scenario.layout.mesh.size(TP) > 1,
    causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
)
def averaged_over_all_ranks(setup: Setup) -> None:
    """Bug: gradients are divided by the number of all ranks, including tensor-parallel ranks."""
    scale_gradients(setup, 1.0 / size_of(setup, TP))


@fault(layouts=WITH_DDP, applies=reduces_by_hooks, causes=(Cause.NOT_REDUCED,))
def parameter_left_out(setup: Setup) -> None:
    """Bug: one parameter's gradient is left out when gradients are reduced."""
    parameter = [parameter for parameter in setup.model.parameters() if parameter.requires_grad][-1]
    own: list[torch.Tensor] = []
    parameter.register_hook(lambda gradient: own.append(gradient.detach().clone()))  # type: ignore[no-untyped-call]
    setup.before_update.append(partial(_put_back, parameter, own))


def _put_back(parameter: torch.Tensor, own: list[torch.Tensor], _optimizer: object, _index: int) -> None:
    if parameter.grad is not None and own:
        parameter.grad.copy_(torch.stack(own).sum(0))
    own.clear()


@fault(layouts=DATA_PARALLEL, applies=has_steps, causes=(Cause.NOT_ZEROED,), minimum=TWO_STEPS)
def gradients_not_zeroed(setup: Setup) -> None:
    """Bug: gradients are not zeroed between steps, so they add up."""

    def keep(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        optimizer.zero_grad = _nothing  # type: ignore[method-assign]

    setup.before_training.append(keep)


def _nothing(set_to_none: bool = True) -> None:
    """Keep gradients."""


@fault(layouts=DATA_PARALLEL, applies=has_steps, causes=(Cause.STALE,), minimum=TWO_STEPS)
def gradients_of_last_step(setup: Setup) -> None:
    """Bug: each update uses the previous step's gradients, as if the reduction finished one step late."""
    kept: dict[torch.Tensor, torch.Tensor] = {}
    setup.before_update.append(lambda optimizer, _index: _delay(optimizer, kept))


def _delay(optimizer: torch.optim.Optimizer, kept: dict[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in optimizer_parameters(optimizer):
            if parameter.grad is None:
                continue
            now = parameter.grad.clone()
            parameter.grad.copy_(kept.get(parameter, now))
            kept[parameter] = now


@fault(
    layouts=DATA_PARALLEL,
    applies=all_of(is_eager, updates_exceed_rounding),
    causes=(Cause.GRADIENT_LOST, Cause.NOT_UPDATED),
    minimum=ONE_RANK,
)
def zeroed_before_update(setup: Setup) -> None:
    """Bug: gradients are zeroed between clipping and the update."""
    around_update(setup, before=lambda optimizer: scale(optimizer, 0.0))
