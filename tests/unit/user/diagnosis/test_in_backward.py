"""Trainings whose hooks update each parameter during backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, check_training
from equivcheck.user.verdict import UserVerdict


def _after_backward(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    optimizer.zero_grad()
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _in_backward(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    hooks = [_hook_of(parameter, optimizer) for parameter in model.parameters()]
    optimizer.zero_grad()
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    for hook in hooks:
        hook.remove()
    return float(loss.detach())


def _hook_of(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    own = torch.optim.SGD([parameter], lr=optimizer.param_groups[0]["lr"])
    return parameter.register_post_accumulate_grad_hook(lambda _parameter: own.step())


def _checked(parallelize: Any, step: Any = _after_backward, rank_step: Any = _in_backward) -> UserVerdict:
    torch.manual_seed(0)
    return check_training(
        model=nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        parallelize=parallelize,
        mesh={"dp": 2},
        batches=[(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(2)],
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        step=step,
        rank_step=rank_step,
    )


def _scaled(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    return _in_backward(model, batch, optimizer, lambda *given: 3.0 * loss_of(*given)) / 3.0


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def test_hooks_update_with_reduced_gradients_under_fully_shard() -> None:
    """FSDP2 calls the hooks after it has reduced a gradient."""
    assert _checked(_fully_sharded).outcome is Outcome.EQUIVALENT


def test_hooks_update_before_distributed_data_parallel_reduces() -> None:
    """Autograd calls the hooks before the reducer's, so each rank updates with its own gradients."""
    verdict = _checked(lambda model, _mesh: DistributedDataParallel(model))
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause.startswith("all gradients are left unreduced over the 2 dp ranks")


def test_unreduced_gradients_are_named_if_one_device_updates_in_backward_as_well() -> None:
    """No gradients are left to reduce after backward, so each emulated rank keeps its own."""
    verdict = _checked(lambda model, _mesh: DistributedDataParallel(model), step=_in_backward)
    assert verdict.cause.startswith("all gradients are left unreduced over the 2 dp ranks: each rank updates inside backward")


def test_scaled_gradients_are_named_if_one_device_updates_in_backward_as_well() -> None:
    """The factor is reproduced through the gradient of the loss."""
    verdict = _checked(_fully_sharded, step=_in_backward, rank_step=_scaled)
    assert verdict.cause == "all gradients are 3 times as large as on one device"


def test_no_cause_is_named_if_one_device_updates_in_backward_and_the_fault_is_unknown() -> None:
    """Most known faults need gradients after backward."""

    def rolled(model: nn.Module, *arguments: Any) -> float:
        hook = model[0].weight.register_hook(lambda gradient: gradient.roll(1, 0))
        value = _in_backward(model, *arguments)
        hook.remove()
        return value

    verdict = _checked(lambda model, _mesh: model, step=_in_backward, rank_step=rolled)
    assert verdict.outcome is Outcome.DIVERGED
    assert not verdict.cause
