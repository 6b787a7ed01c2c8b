"""Meshes in a user's functions: as an argument, and in variables that simulated ranks share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from equivcheck import Outcome, UsageError, check_training
from unit.user.programs import brought, loss

_shared: dict[str, Any] = {}
TWO_AXES = {"dp": 2, "tp": 2}


def reduce_over(group: Any, model: nn.Module) -> None:
    """Average gradients."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def train(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any, reduce: Callable[[nn.Module], None]
) -> torch.Tensor:
    """Take a step that reduces gradients before the update."""
    optimizer.zero_grad()
    value: torch.Tensor = loss(model(batch[0]), batch[1])
    value.backward()
    reduce(model)
    optimizer.step()
    return value


def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any, mesh: DeviceMesh | None) -> torch.Tensor:
    """Reduce over the mesh on ranks."""
    return train(model, batch, optimizer, loss, lambda model: mesh and reduce_over(mesh.get_group("dp"), model))


def step_of_shared(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> torch.Tensor:
    """Reduce over the mesh in a module global."""
    return train(model, batch, optimizer, loss, lambda model: reduce_over(_shared["mesh"].get_group("dp"), model))


def step_of_group(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> torch.Tensor:
    """Reduce over the group in a module global."""
    return train(model, batch, optimizer, loss, lambda model: reduce_over(_shared["group"], model))


def step_of_cached(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> torch.Tensor:
    """Reduce over a mesh from a cached function."""
    return train(model, batch, optimizer, loss, lambda model: reduce_over(cached_mesh()["dp"].get_group(), model))


def single_step(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> torch.Tensor:
    """Take a step without communication."""
    return train(model, batch, optimizer, loss, lambda _: None)


def keep_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Store the mesh in a module global, before any rank uses it."""
    _shared["mesh"] = mesh
    dist.barrier()


def keep_group(model: nn.Module, mesh: DeviceMesh) -> None:
    """Store a group in a module global."""
    _shared["group"] = dist.new_group([0, 1])


@lru_cache
def cached_mesh() -> DeviceMesh:
    """Create a mesh once for each process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def untouched(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the model to the step."""


SHARED = [
    pytest.param(keep_mesh, step_of_shared, {"dp": 2}, id="1-D"),
    pytest.param(keep_mesh, step_of_shared, TWO_AXES, id="2-D"),
    pytest.param(keep_group, step_of_group, {"dp": 2}, id="group"),
    pytest.param(untouched, step_of_cached, TWO_AXES, id="cached"),
]


@pytest.mark.parametrize(("parallelize", "rank_step", "mesh"), SHARED)
def test_a_shared_mesh_is_refused_in_sim(parallelize: Any, rank_step: Any, mesh: dict[str, int]) -> None:
    """The error has the line, the reason and two ways out."""
    arguments = brought(parallelize=parallelize, step=single_step, rank_step=rank_step, mesh=mesh)
    with pytest.raises(UsageError) as caught:
        check_training(**arguments)
    text = str(caught.value)
    assert re.search(r"of another rank \(\S*test_meshes\.py:\d+, in ", text)
    assert "share module globals, class attributes and cached functions" in text
    assert 'Expected world="gloo"' in text
    assert "a parameter `mesh`" in text


@pytest.mark.slow
@pytest.mark.parametrize(("parallelize", "rank_step", "mesh"), SHARED)
def test_a_shared_mesh_is_right_in_processes(parallelize: Any, rank_step: Any, mesh: dict[str, int]) -> None:
    """Each process has its own module globals."""
    arguments = brought(parallelize=parallelize, step=single_step, rank_step=rank_step, mesh=mesh)
    check_training(**arguments, world="gloo").assert_equivalent()


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: mesh.get_coordinate(),
        lambda mesh: mesh.get_local_rank("dp"),
        lambda mesh: distribute_tensor(torch.ones(4), mesh),
        lambda mesh: mesh["dp"].get_group(),
    ],
)
def test_no_use_of_a_shared_mesh_is_silently_wrong(use: Callable[[DeviceMesh], Any]) -> None:
    """The coordinate of another rank would give wrong shards."""

    def using(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> torch.Tensor:
        use(_shared["mesh"])
        return single_step(model, batch, optimizer, loss)

    with pytest.raises(UsageError, match="of another rank"):
        check_training(**brought(parallelize=keep_mesh, step=single_step, rank_step=using))


def test_step_and_loss_get_the_mesh() -> None:
    """They get the rank's own mesh on ranks, and None on one device."""
    seen: list[int | None] = []

    def watched(outputs: torch.Tensor, targets: torch.Tensor, *, mesh: DeviceMesh | None = None) -> torch.Tensor:
        seen.append(None if mesh is None else mesh.get_local_rank("dp"))
        return loss(outputs, targets)

    check_training(**brought(parallelize=untouched, step=step, loss=watched, mesh=TWO_AXES)).assert_equivalent()
    assert set(seen) == {None, 0, 1}


def test_only_ranks_need_the_mesh() -> None:
    """`rank_step` gets the mesh, too, and the diagnosis repeats such a step."""
    arguments = brought(parallelize=untouched, step=single_step)
    check_training(**arguments, rank_step=step).assert_equivalent()
    assert check_training(**arguments, rank_step=partial(step, mesh=None)).outcome is Outcome.EQUIVALENT
    assert check_training(**arguments, rank_step=single_step).outcome is Outcome.DIVERGED


@pytest.mark.usefixtures("with_causes")
def test_the_diagnosis_passes_the_mesh() -> None:
    """The diagnosis repeats the step on ranks, and finds the cause and the place."""

    def summing(model: nn.Module, batch: Any, optimizer: Any, loss: Any, mesh: DeviceMesh) -> torch.Tensor:
        def reduce(model: nn.Module) -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))

        return train(model, batch, optimizer, loss, reduce)

    verdict = check_training(**brought(parallelize=untouched, step=single_step, rank_step=summing))
    assert "sum over the 2 dp ranks" in verdict.cause
    assert "first difference is in the parameter gradients" in verdict.where


def test_a_mesh_with_a_value_stays() -> None:
    """A default other than None is the user's own."""
    own: Any = "not a mesh"

    def step(model: nn.Module, batch: Any, optimizer: Any, loss: Any, mesh: Any = own) -> torch.Tensor:
        assert mesh is own
        return single_step(model, batch, optimizer, loss)

    assert check_training(**brought(step=step)).outcome is Outcome.EQUIVALENT
