"""DTensors are read correctly in sim, whatever each rank holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds import probes
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]
pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what it would do faster on other meshes

NOT_PADDED = {98} if is_torch_in("<2.10") else set()
"""Seeds with an empty unsharded dim, whose shards torch cannot pad, even over gloo."""
PUT_TOGETHER_AS_IF_EVEN = {2, 6} if is_torch_in("<2.10") else set()
"""Row counts with uneven strided shards, which torch reassembles wrongly, even over gloo (pytorch #163843)."""


def test_redistributed_tensors_are_what_they_were(world: World) -> None:
    """Any placements of a small tensor on any mesh of four ranks, including uneven and empty shards."""
    seeds = sorted(set(range(150)) - NOT_PADDED)
    wrong = [seed for seed in seeds if not all(map(all, world(4).run(probes.check_redistributions, seed).values))]
    assert not wrong


def test_redistributed_tensors_are_what_they_were_over_gloo() -> None:
    """Over gloo these programs are right too."""
    wrong = [seed for seed in range(20) if not all(map(all, ranks("gloo", 4).run(probes.check_redistributions, seed).values))]
    assert not wrong


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_parameters_cut_twice_are_read_as_they_are(world: World, kind: str) -> None:
    """Weight and gradient of a layer under tensor parallelism and `fully_shard`, for any remainder."""
    for rows in sorted(set(range(2, 10)) - PUT_TOGETHER_AS_IF_EVEN):
        assert world(4).run(probes.check_double_sharding, kind, rows).values == ([True, True],) * 4, rows


def test_loss_parallel_is_entered_and_left_by_each_rank(world: World) -> None:
    """Loss and gradient match the single-device run, although ranks enter and leave one by one."""
    for seed in range(4):
        assert world(4).run(probes.check_loss_parallel, schedule_seed=seed).values == ([True, True],) * 4


def looked_up(rows: int) -> bool:
    """Whether lookups in a row-sharded embedding give its rows; each rank masks the rows that it does not hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = torch.arange(4.0 * rows).view(rows, 4)
    spread = distribute_tensor(table, mesh, [Shard(0)])
    indices = torch.arange(2 * rows) % rows
    found = nn.functional.embedding(distribute_tensor(indices, mesh, [Replicate()]), spread)
    dist.barrier()
    return torch.equal(found.full_tensor(), table[indices])


def test_masks_are_a_ranks_own(world: World) -> None:
    """A rank's mask of a lookup is not used by the next rank."""
    for rows in (5, 7, 5):
        assert world(3).run(looked_up, rows).values == (True,) * 3


def test_meshes_of_ranks_differ(world: World) -> None:
    """A mesh equals another one of its rank but none of another rank, so torch's caches keyed by mesh are separate."""
    meshes: dict[int, list[DeviceMesh]] = {}

    def program() -> None:
        made = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2)]
        meshes[dist.get_rank()] = [*made, *(mesh["tp"] for mesh in made)]

    world(4).run(program)
    for rank, (first, second, part, other) in meshes.items():
        assert first == second
        assert hash(first) == hash(second)
        assert part == other
        assert all(first != others[0] and part != others[2] for number, others in meshes.items() if number != rank)
    assert DeviceMesh.__init__.__qualname__ == "DeviceMesh.__init__"
