"""Ranks that start from different parameters and buffers agree along data-parallel axes once wrapped, and along no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from equivcheck import Scenario, check
from equivcheck.layouts.base.unequal_start import make_unequal
from equivcheck.scenario import DDP, Layout, Parallelism
from equivcheck.strategies import layouts, scenarios
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.world import World

FEW = settings(deadline=None, max_examples=max(5, settings().max_examples // 20))
SIZES = st.sampled_from([(2, 1), (2, 2), (3, 1), (2, 3), (4, 2)])


def _unequal(layout: Layout) -> Layout:
    def changed(parallelism: Parallelism) -> Parallelism:
        return replace(parallelism, unequal_start=True) if isinstance(parallelism, DDP) else parallelism

    return replace(layout, parallelisms=tuple(map(changed, layout.parallelisms)))


@FEW
@given(scenarios(layouts=layouts(tags=("ddp", "ddp x tensor_parallel"), max_ranks=4).map(_unequal)))
def test_ddp_makes_ranks_equal(scenario: Scenario) -> None:
    """DDP sends the first rank's parameters and buffers, plain and of DTensors, along its own axis: the training is as always."""
    check(scenario).assert_no_finding()


class _Module(nn.Module):
    """A linear to split, one to leave alone, a plain buffer and a DTensor one."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.split, self.whole = nn.Linear(features, width), nn.Linear(width, features)
        self.register_buffer("plain", torch.zeros(features))
        self.register_buffer("sharded", torch.zeros(width))


def _synchronised(sizes: tuple[int, int], features: int, width: int) -> list[tuple[int, ...]]:
    """What a rank holds before and after wrapping, hashed: parameters and buffers in order."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    module = _Module(features, width)
    parallelize_module(module, mesh["tp"], {"split": ColwiseParallel()})
    module.sharded = distribute_tensor(module.sharded, mesh["tp"], [Shard(0)])
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            _local(tensor).fill_(float(mesh["tp"].get_local_rank()))
    make_unequal(module, mesh["dp"])
    before = _contents(module)
    wrapped = FullyShardedDataParallel(
        module, device_mesh=mesh["dp"], device_id=torch.device("cpu"), sync_module_states=True, use_orig_params=False
    )
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        return [before, _contents(module)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _contents(module: nn.Module) -> tuple[int, ...]:
    return tuple(
        hash(tuple(_local(tensor.detach()).reshape(-1).tolist())) for tensor in (*module.parameters(), *module.buffers())
    )


@FEW
@given(sizes=SIZES, features=st.integers(1, 5), width=st.sampled_from([2, 4, 6]))
def test_fsdp1_makes_ranks_equal_along_dp_alone(sizes: tuple[int, int], features: int, width: int) -> None:
    """With `sync_module_states` a rank ends with what the first data-parallel rank of its tensor-parallel place had.

    FSDP1 refuses that on CPU by a mere check, which is lifted here.
    """
    with pytest.MonkeyPatch.context() as patch, World("sim", size=sizes[0] * sizes[1]) as world:
        patch.setattr(_init_utils, "_check_module_states_for_sync_module_states", lambda states: None)
        held = world.run(_synchronised, sizes, features, width * sizes[1]).values
    for rank, (before, after) in enumerate(held):
        first, _ = held[rank % sizes[1]]
        assert after == first
        assert before == first if rank < sizes[1] else not set(before) & set(first)
    assert len({after for _, after in held}) == sizes[1]


def test_fsdp1_makes_ranks_equal_on_accelerators_only() -> None:
    """Without lifting it, the check refuses: should torch drop it, `FSDP1` can have the option that `DDP` has."""
    with World("sim", size=2) as world, pytest.raises(RanksFailed, match="requires them to be on GPU"):
        world.run(_synchronised, (2, 1), 2, 2)
