"""A rank's elements are sketched at their positions in the full tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from equivcheck.recording.assemble import Part, assemble
from equivcheck.recording.sketch import sketch_parts
from equivcheck.recording.tensors import entries_of
from equivcheck.recording.trace import Entry, Moment
from equivcheck.training.read import pieces_of
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.trace import Piece

FULL = torch.arange(300 * 8, dtype=torch.float64).reshape(300, 8) ** 1.5


def packed_entries(dim: int) -> list[Entry]:
    """Entries of a rank that holds its part of each of two packed matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.cat([half.chunk(mesh.size(), dim)[mesh.get_local_rank()] for half in FULL.chunk(2, dim)], dim)
    tensor = DTensor.from_local(local, mesh, [_StridedShard(dim, split_factor=2)], run_check=False)
    return list(entries_of(Moment.START, [(pieces_of("weight", tensor), tensor)]))


@pytest.mark.parametrize("dim", [0, 1])
def test_packed_parts_add_up_along_either_dim(dim: int) -> None:
    """Local elements of packed matrices alternate if they are sharded along dim 1."""
    entries = [entry for own in ranks("sim", 2).run(packed_entries, dim).values for entry in own]
    found = assemble([Part(rank=0, piece=entry.piece, value=entry.sketch) for entry in entries]).value
    (expected,) = sketch_parts([(Piece(name="weight", shape=tuple(FULL.shape)), FULL)])
    assert found is not None
    assert found.distance(expected) <= 1e-12 * expected.norm
