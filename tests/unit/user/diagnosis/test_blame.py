"""The verdict blames the rank that differs from one device, or all ranks if all differ in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import check_training
from equivcheck.worlds.trace.differences import Difference, Phase
from support.verdicts import first_divergence
from unit.user.programs import batches, brought, said

pytestmark = pytest.mark.usefixtures("without_causes")


def scaled(factors: dict[int, float]) -> Callable[..., None]:
    """Data parallelism by hooks, with averages scaled on some ranks."""

    def average(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size() * factors.get(dist.get_rank(), 1.0)

    def parallelize(model: nn.Module, _mesh: DeviceMesh) -> None:
        for parameter in model.parameters():
            parameter.register_hook(average)

    return parallelize


@pytest.mark.parametrize(
    ("factors", "blamed", "other"),
    [
        ({0: 10.0}, 0, 1),
        pytest.param({1: 10.0}, 1, 0, marks=pytest.mark.slow),
        ({0: 1 + 1e-15, 2: 10.0}, 2, 0),
        ({0: 2.0, 1: 3.0, 2: 2.0}, 1, 0),
    ],
)
def test_of_ranks_that_disagree_the_one_off_the_reference_is_blamed(factors: dict[int, float], blamed: int, other: int) -> None:
    """The verdict shows the values on one device, on the wrong rank and on another rank."""
    size = max(*factors, 1) + 1

    verdict = check_training(**brought(mesh={"dp": size}, batches=batches(6), parallelize=scaled(factors)))

    found = verdict.divergence
    assert found is not None
    assert (found.phase, found.difference, found.rank) == (Phase.GRADIENT, Difference.RANKS_DISAGREE, blamed)
    assert float(found.actual) == pytest.approx(factors[blamed] * float(found.expected))
    whose, _, value = found.elsewhere.rpartition(" ")
    assert whose == f"rank {other} has"
    assert float(value) == pytest.approx(factors.get(other, 1.0) * float(found.expected))
    assert found.elsewhere in said(verdict)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's full tensors by name."""
    return dict(module.named_parameters())


@pytest.mark.parametrize("full_tensors", [None, whole])
def test_ranks_that_are_off_alike_are_all_named(full_tensors: Any) -> None:
    """If all ranks are wrong in the same way, the verdict names all of them."""
    verdict = check_training(**brought(parallelize=scaled({0: 2.0, 1: 2.0}), full_tensors=full_tensors))
    assert verdict.divergence is not None
    assert (verdict.divergence.difference, verdict.divergence.ranks) == (Difference.VALUE, (0, 1))
    assert "on ranks 0, 1" in said(verdict)
    assert "on ranks 0, 1" in verdict.reason


def test_a_rank_that_lost_state_of_its_shard_is_not_hidden_by_the_first() -> None:
    """If ranks gather each other's shards, a wrong shard is wrong on every rank."""

    def lost_on_one(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(batch[0]), batch[1])
        value.backward()
        if dist.get_rank() == 1:
            optimizer.state.clear()
        optimizer.step()
        for number, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, src=number % 2)
        return value

    first = first_divergence(check_training(**brought(parallelize=scaled({}), rank_step=lost_on_one)))
    found = first
    assert (found.step, found.phase, found.tensor, found.ranks) == (1, Phase.UPDATE, "0.bias", (0, 1))
