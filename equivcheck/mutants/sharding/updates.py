"""Parameters not updated, or computation with outdated parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, fault
from equivcheck.mutants.needs import all_of, has_data_ranks, has_steps, is_eager, updates_exceed_rounding
from equivcheck.mutants.rank import optimizer_parameters
from equivcheck.mutants.sharding.reductions import FULLY_SHARDED, is_sharded, num_shards
from equivcheck.mutants.torch_private import disable_broadcasts, fsdp_modules
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, Scenario, Training
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup

OPTIMIZERS = ("fsdp2", "fsdp1", "ddp", "replicate", "fsdp2 x tensor_parallel")
"""Layouts in which the optimizer can be set up wrongly."""


def _has_tail(scenario: Scenario) -> bool:
    """Whether some rank holds fewer rows than others, but not none."""
    model, count = scenario.training.model, num_shards(scenario)
    sizes = [parameter.shape[0] for parameter in parameters_of(model) if parameter.trained and parameter.shape]
    return is_sharded(scenario) and any(size % -(-size // count) for size in sizes)


def is_not_resumed(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and there is no checkpoint. A wrongly built optimizer cannot be saved."""
    return is_eager(scenario) and scenario.resume is None


def _shares_updates(scenario: Scenario) -> bool:
    shares = any(parallelism.zero_redundancy for parallelism in scenario.layout.of(DDP))
    return has_data_ranks(scenario) and shares


@fault(layouts=FULLY_SHARDED, applies=all_of(_has_tail, updates_exceed_rounding), causes=(Cause.NOT_UPDATED,))
def padded_tail_not_updated(setup: Setup) -> None:
    """Bug: rows in a padded last shard are never updated."""
    update = setup.update

    def but_tails(optimizer: torch.optim.Optimizer) -> None:
        tails = [local for parameter in optimizer_parameters(optimizer) if (local := _tail(parameter)) is not None]
        before = [local.clone() for local in tails]
        update(optimizer)
        with torch.no_grad():
            for local, values in zip(tails, before, strict=True):
                local.copy_(values)

    setup.update = but_tails


def _tail(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard if it is shorter than the first, but not empty."""
    if not isinstance(parameter, DTensor) or not any(isinstance(placement, Shard) for placement in parameter.placements):
        return None
    local: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    axis = next(axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    whole, count = parameter.shape[0], parameter.device_mesh.size(axis)
    return local if 0 < local.shape[0] < -(-whole // count) else None


@fault(layouts=OPTIMIZERS, applies=all_of(is_not_resumed, updates_exceed_rounding), causes=(Cause.NOT_UPDATED,), minimum=ONE_RANK)
def optimizer_of_unwrapped_parameters(setup: Setup) -> None:
    """Bug: the optimizer holds the parameters from before wrapping, so the model is never updated."""
    build = setup.build_optimizer

    def build_for_copies(training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return build(training, [(name, _copy(parameter)) for name, parameter in parameters])

    setup.build_optimizer = build_for_copies


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


@fault(layouts=FULLY_SHARDED, applies=all_of(has_steps, updates_exceed_rounding), causes=(Cause.STALE,), minimum=TWO_STEPS)
def parameters_not_gathered_again(setup: Setup) -> None:
    """Bug: parameters are not resharded after backward, so the next forward uses outdated values."""
    accumulation = setup.accumulation

    def keeping(last: bool) -> AbstractContextManager[object]:
        for module in fsdp_modules(setup):
            module.set_reshard_after_backward(not last)
        return accumulation(last)

    setup.accumulation = keeping


@fault(layouts=OPTIMIZERS, applies=all_of(has_steps, updates_exceed_rounding), causes=(Cause.STALE,), minimum=TWO_STEPS)
def parameters_of_last_step(setup: Setup) -> None:
    """Bug: each step computes with the previous step's initial parameters."""
    compute, earlier = setup.compute, list[list[torch.Tensor]]()

    def on_old(altered: Setup, microbatches: Any, index: int) -> float | None:
        held = [local_values(slot.parameter) for slot in altered.find_slots(altered.model)]
        now = [values.clone() for values in held]
        _overwrite(held, earlier[-1] if earlier else now)
        earlier[:] = [now]
        loss = compute(altered, microbatches, index)
        _overwrite([local_values(slot.parameter) for slot in altered.find_slots(altered.model)], now)
        return loss

    setup.compute = on_old


def _overwrite(held: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, new in zip(held, values, strict=True):
            tensor.copy_(new)


@fault(
    layouts=("ddp",),
    applies=all_of(_shares_updates, updates_exceed_rounding),
    causes=(Cause.NOT_UPDATED, Cause.RANKS_DISAGREE),
)
def updated_shards_not_sent(setup: Setup) -> None:
    """Bug: each rank updates its part of the parameters, but does not broadcast it."""
    setup.before_training.append(lambda optimizer, _schedule: disable_broadcasts(optimizer))
