"""Gradients that are None when the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from equivcheck import check_training
from equivcheck.oracle.verdict.cause import Cause
from unit.user.programs import brought

SYNC = ", as FSDP2 leaves gradients while their sync is off (`set_requires_gradient_sync(False)`)"


def model() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def in_two_units(model: Any, mesh: DeviceMesh) -> None:
    """FSDP2 with a unit for the first layer."""
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def first_unit_off(model: Any, mesh: DeviceMesh) -> None:
    """The first layer's unit never reduces."""
    in_two_units(model, mesh)
    model[0].set_requires_gradient_sync(False)


def step_off(is_off: Callable[[int], bool]) -> Callable[..., Any]:
    """A step that turns the sync off at some steps."""
    seen: dict[int, int] = {}

    def step(model: Any, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        number = seen[dist.get_rank()] = seen.get(dist.get_rank(), -1) + 1
        model.set_requires_gradient_sync(not is_off(number))
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        return value

    return step


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"parallelize": first_unit_off}, f"the gradients of `0.weight` and `0.bias` are None when the optimizer steps{SYNC}"),
        ({"rank_step": step_off(lambda _: True)}, f"all gradients are None when the optimizer steps{SYNC}"),
        (
            {"rank_step": step_off(lambda number: number > 0)},
            f"all gradients are None when the optimizer steps, from step 1 on{SYNC}",
        ),
        (
            {"rank_step": step_off(lambda number: number == 0)},
            f"all gradients are None when the optimizer steps, at step 0{SYNC}; "
            "the missing gradients are added to those of the next step that has any",
        ),
    ],
    ids=["one_unit", "always", "later", "once"],
)
def test_gradients_without_sync_are_explained(changes: dict[str, Any], cause: str) -> None:
    """FSDP2 keeps unreduced gradients to itself."""
    verdict = check_training(**brought(model=model, parallelize=in_two_units) | changes)
    assert (verdict.cause, verdict.kinds) == (cause, (Cause.GRADIENT_LOST,))


def test_all_ranks_without_a_gradient_are_named() -> None:
    """Not only the first one."""
    verdict = check_training(**brought(model=model, parallelize=first_unit_off), explain=False)
    assert verdict.divergence is not None
    assert (verdict.divergence.rank, verdict.divergence.ranks) == (0, (0, 1))
    assert "0.weight on ranks 0, 1\n" in verdict.describe()


def frozen_on_one(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The second rank freezes the last bias, and the other averages."""

    def mean(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    for name, parameter in model.named_parameters():
        if name != "2.bias":
            parameter.register_hook(mean)
    model[2].bias.requires_grad = mesh.get_rank() == 0
    return model


def test_a_gradient_that_one_rank_lacks_is_not_blamed_on_fsdp() -> None:
    """Without FSDP2 only the fact is named; here, the other rank's gradient is wrong as well."""
    verdict = check_training(**brought(model=model, parallelize=frozen_on_one))
    assert verdict.divergence is not None
    assert (verdict.divergence.tensor, verdict.divergence.ranks) == ("2.bias", (1,))
    assert not verdict.cause
