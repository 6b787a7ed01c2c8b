"""DTensor's caches of one mesh do not affect another mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]
FLAT, DEEP = ((2, 2), ("dp", "tp")), ((1, 2, 2), ("dp_replicate", "dp_shard", "tp"))
"""Meshes of the same four ranks, with equal submeshes along tp."""


def added(mesh: tuple[tuple[int, ...], tuple[str, ...]]) -> DTensor:
    """Add one to a tensor on the submesh along tp."""
    local = torch.ones(46, 3, dtype=torch.float64)
    return DTensor.from_local(local, device_mesh(*mesh)["tp"], [Shard(0)], run_check=False) + 1


def on_some_ranks() -> None:
    """Simulate a run in which one rank fails: of two ranks that share a submesh, one gets further."""
    device_mesh(*FLAT)
    if dist.get_rank() % 2 == 0:
        added(FLAT)


def lies_on_its_mesh() -> tuple[bool, tuple[int, ...]]:
    """Whether a result has the mesh on which it was computed, and its full shape."""
    found = added(DEEP)
    return found.device_mesh.get_group() is device_mesh(*DEEP)["tp"].get_group(), tuple(found.full_tensor().shape)


def test_an_answer_for_an_equal_part_of_another_mesh_is_forgotten(world: World) -> None:
    """Each rank communicates over the groups of its current mesh, whatever it has computed on others before."""
    ranks = world(4)
    ranks.run(on_some_ranks)

    assert ranks.run(lies_on_its_mesh).values == ((True, (92, 3)),) * 4
