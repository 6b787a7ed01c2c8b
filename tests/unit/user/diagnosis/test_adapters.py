"""Trainings of low-rank adapters next to frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, check_training
from equivcheck.user.verdict import UserVerdict


class Adapted(nn.Module):
    """A frozen linear with a trained product of two factors added."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.down, self.up = nn.Linear(in_features, 2, bias=False), nn.Linear(2, out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add the factors' product, times two."""
        outputs: torch.Tensor = self.base(inputs) + 2.0 * self.up(self.down(inputs))
        return outputs


def _optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=0.1)


def _checked(parallelize: Any, **steps: Any) -> UserVerdict:
    torch.manual_seed(0)
    return check_training(
        model=nn.Sequential(Adapted(5, 7), nn.Tanh(), Adapted(7, 3)),
        parallelize=parallelize,
        mesh={"dp": 2},
        batches=[(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(2)],
        loss=functional.mse_loss,
        optimizer=_optimizer,
        **steps,
    )


def _step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    return _stepped(model, batch, optimizer, loss_of, lambda _name, _gradient: None)


def _stepped(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any, reduce: Any) -> float:
    optimizer.zero_grad()
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            reduce(name, parameter.grad)
    optimizer.step()
    return float(loss.detach())


def _average(_name: str, gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def _reduce_down_twice(name: str, gradient: torch.Tensor) -> None:
    _average(name, gradient)
    if "down" in name:
        dist.all_reduce(gradient)


def _leave_up(name: str, gradient: torch.Tensor) -> None:
    if "up" not in name:
        _average(name, gradient)


def _train_plain_model(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Each rank trains the plain model."""


def _with_explicit_reduction(reduce: Callable[[str, torch.Tensor], None], parallelize: Any = _train_plain_model) -> UserVerdict:
    return _checked(parallelize, step=_step, rank_step=lambda *given: _stepped(*given, reduce))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        if isinstance(layer, Adapted):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _replicate(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


@pytest.mark.parametrize("parallelize", [_replicate, _shard], ids=["ddp", "fully_shard"])
def test_adapters_may_be_replicated_or_sharded_with_their_frozen_weights(parallelize: Any) -> None:
    """Frozen weights have no gradients to reduce."""
    assert _checked(parallelize).outcome is Outcome.EQUIVALENT


def test_gradients_of_adapters_may_be_averaged_explicitly() -> None:
    """Only trained parameters have gradients."""
    assert _with_explicit_reduction(_average).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("wrap", [_replicate, _shard], ids=["ddp", "fully_shard"])
def test_a_trained_base_is_named(wrap: Any) -> None:
    """The verdict names frozen weights that ranks train."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> Any:
        return wrap(model.requires_grad_(True), mesh)

    verdict = _checked(parallelize)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause == "`0.base.weight`, `0.base.bias` and 2 more are frozen on one device, but trained on your ranks"


@pytest.mark.parametrize(
    ("reduce", "cause"),
    [
        (
            _reduce_down_twice,
            "the gradients of `0.down.weight` and `2.down.weight` are the sum over the 2 dp ranks, not the mean",
        ),
        (_leave_up, "the gradients of `0.up.weight` and `2.up.weight` are left unreduced over the 2 dp ranks"),
    ],
    ids=["reduced twice", "not reduced"],
)
def test_a_wrong_reduction_of_one_factor_is_named(reduce: Any, cause: str) -> None:
    """The other factor's gradients are right."""
    verdict = _with_explicit_reduction(reduce)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause.startswith(cause)


def test_factors_that_ranks_draw_themselves_are_named() -> None:
    """Without a wrapper, nothing makes the ranks' factors equal."""

    def parallelize(model: nn.Module, _mesh: DeviceMesh) -> None:
        torch.manual_seed(dist.get_rank())
        for layer in model.children():
            if isinstance(layer, Adapted):
                layer.down.reset_parameters()

    verdict = _with_explicit_reduction(_average, parallelize)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.cause == "every rank starts with other values of `0.down.weight` and `2.down.weight` than one device"
