"""A step's records are read without communication."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from equivcheck.recording.watch.step_record import StepRecord
from equivcheck.worlds.pool import ranks


def recorded_norms() -> tuple[float, ...]:
    """Norms of a sharded and of a replicated gradient."""
    mesh, gradient = init_device_mesh("cpu", (dist.get_world_size(),)), torch.full((4, 4), 0.5)
    norms = [torch.linalg.vector_norm(distribute_tensor(gradient, mesh, [each])) for each in (Shard(0), Replicate())]
    clips = [(norm, 1.0, 2.0) for norm in norms]
    return tuple(clip.norm for clip in StepRecord(clips=clips).to_recorded_step(0, (), 0).clips)


def test_a_norm_in_parts_is_not_known() -> None:
    """Each rank has only its own part, which is no norm of the whole gradient."""
    for sharded, replicated in ranks("sim", 2).run(recorded_norms).values:
        assert math.isnan(sharded)
        assert replicated == 2.0
