"""Simulated ranks are threads, so they refuse meshes and groups of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def swapped(make: Callable[[], Any], use: Callable[[Any], Any]) -> Callable[[], None]:
    """Program in which each rank uses the object that the other of two ranks has made."""
    made: dict[int, Any] = {}

    def program() -> None:
        made[dist.get_rank()] = make()
        dist.barrier()
        use(made[1 - dist.get_rank()])

    return program


def two_by_one() -> DeviceMesh:
    """Mesh with a subgroup for each rank."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    "use",
    [
        dist.get_rank,
        dist.get_backend,
        dist.get_process_group_ranks,
        dist.destroy_process_group,
        lambda group: group.rank(),
        lambda group: dist.get_global_rank(group, 0),
        dist.barrier,
        lambda group: dist.all_reduce(torch.ones(2), group=group),
        lambda group: dist.broadcast(torch.ones(2), src=0, group=group),
        lambda group: dist.send(torch.ones(2), 1 - dist.get_rank(), group=group),
        lambda group: dist.all_gather_object([None, None], 0, group=group),
        lambda group: funcol.all_reduce(torch.ones(2), "sum", group),
        lambda group: DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group),
    ],
)
def test_a_group_of_another_rank_is_refused(world: World, use: Callable[[Any], Any]) -> None:
    """Every call that depends on the rank raises."""
    with pytest.raises(RanksFailed, match="UsedByOtherRank: process group: "):
        world(2).run(swapped(lambda: dist.new_group([0, 1]), use))


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: mesh.get_coordinate(),
        lambda mesh: mesh.get_local_rank("dp"),
        lambda mesh: mesh.get_group("tp"),
        lambda mesh: mesh["dp"].get_coordinate(),
        lambda mesh: DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()]),
    ],
)
def test_a_mesh_of_another_rank_is_refused(world: World, use: Callable[[DeviceMesh], Any]) -> None:
    """Its coordinate and its groups are the other rank's."""
    with pytest.raises(RanksFailed, match="UsedByOtherRank: device mesh: "):
        world(2).run(swapped(two_by_one, use))


def test_what_ranks_share_may_be_used(world: World) -> None:
    """Shape, names and sizes do not depend on the rank."""

    def use(mesh: DeviceMesh) -> None:
        assert (tuple(mesh.shape), mesh.mesh_dim_names, mesh.size(0)) == ((2, 1), ("dp", "tp"), 2)

    world(2).run(swapped(two_by_one, use))
    world(2).run(swapped(lambda: dist.new_group([0, 1]), dist.get_world_size))


def test_a_copy_belongs_to_the_rank_that_makes_it(world: World) -> None:
    """A rank copies its own mesh with a model, and reads the copy."""

    def program() -> tuple[Any, str]:
        mesh = copy.deepcopy(two_by_one())
        return mesh.get_coordinate(), mesh.get_group("dp").group_name

    values = world(2).run(program).values
    assert [tuple(place) for place, _ in values] == [(0, 0), (1, 0)]
