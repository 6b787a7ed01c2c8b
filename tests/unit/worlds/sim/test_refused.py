"""APIs impossible on rank threads are refused with a reason, and work in other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_thread_executor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def test_async_save(world: World, tmp_path: Path) -> None:
    """A thread that is no rank would save only one rank's shards."""
    with pytest.raises(RanksFailed, match="CallRefused: async_save: a simulated rank is not supported"):
        world(2).run(lambda: dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=tmp_path))


def test_context_parallelism(world: World) -> None:
    """It would replace attention for all ranks."""

    def program() -> None:
        tensor = torch.ones(1, 1, 4, 2)
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=[tensor], buffer_seq_dims=[2]):
            torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor)

    with pytest.raises(RanksFailed, match="CallRefused: context parallelism: a simulated rank is not supported"):
        world(2).run(program)


def test_what_was_refused_is_torchs_again(world: World) -> None:
    """After a run refused functions are torch's own again."""
    before = _async_thread_executor._ThreadBasedAsyncCheckpointExecutor.execute_save
    world(2).run(lambda: None)
    assert _async_thread_executor._ThreadBasedAsyncCheckpointExecutor.execute_save is before
