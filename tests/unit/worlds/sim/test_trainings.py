"""Real parallel trainings in the simulated world equal the single-device training, and repeat bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]
Tensors = list[torch.Tensor]

STEPS, BATCH, WIDTH = 3, 8, 8


def build() -> nn.Sequential:
    """Model with equal weights on each call."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


BASE = build()
INPUTS = torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(STEPS, BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, inputs: Iterable[Any], targets: Iterable[Any]) -> nn.Module:
    """Three steps of AdamW on the mean squared error."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for source, target in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        ((model(source) - target) ** 2).mean().backward()
        optimizer.step()
    return model


def mine(batches: torch.Tensor) -> torch.Tensor:
    """The rank's part of every batch."""
    return batches.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def full(model: nn.Module) -> Tensors:
    """Parameters, gathered if they are sharded."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone() for parameter in parameters]


def ddp(**options: Any) -> Tensors:
    """Data parallel."""
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(BASE), **options)
    return full(train(model, mine(INPUTS), mine(TARGETS)))


def ddp_small_buckets() -> Tensors:
    """Data parallel with about one bucket for each parameter."""
    return ddp(bucket_cap_mb=1e-4, gradient_as_bucket_view=True)


def ddp_find_unused() -> Tensors:
    """Data parallel that searches for unused parameters."""
    return ddp(find_unused_parameters=True)


def ddp_static_graph() -> Tensors:
    """Data parallel with a static graph, whose first reduction is delayed."""
    return ddp(static_graph=True)


def ddp_with_hook() -> Tensors:
    """Data parallel with a communication hook that chains a future."""

    def average(_, bucket):  # DDP reads annotations as objects
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 1)

    model = nn.parallel.DistributedDataParallel(copy.deepcopy(BASE), bucket_cap_mb=1e-4)
    model.register_comm_hook(None, average)
    return full(train(model, mine(INPUTS), mine(TARGETS)))


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> Tensors:
    """FSDP1, each layer wrapped."""
    model = FullyShardedDataParallel(
        copy.deepcopy(BASE),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    train(model, mine(INPUTS), mine(TARGETS))
    with FullyShardedDataParallel.summon_full_params(model):
        return full(model)


def fsdp1_grad_only() -> Tensors:
    """FSDP1 that shards only gradients and optimizer state."""
    return fsdp1(ShardingStrategy.SHARD_GRAD_OP)


def fsdp2(shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> Tensors:
    """FSDP2 on each layer and on the model."""
    mesh, model = device_mesh(shape or (dist.get_world_size(),), names), copy.deepcopy(BASE)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return full(train(model, mine(INPUTS), mine(TARGETS)))


def fsdp2_in_memory_of_the_group() -> Tensors:
    """FSDP2 that asks its group for memory, which gloo cannot allocate."""
    model = copy.deepcopy(BASE)
    module = fully_shard(model, mesh=device_mesh((dist.get_world_size(),), ("dp",)))
    module.set_allocate_memory_from_process_group_for_comm(True)
    return full(train(model, mine(INPUTS), mine(TARGETS)))


def hsdp() -> Tensors:
    """FSDP2 on a 2-D mesh: replicas of shards."""
    return fsdp2((2, dist.get_world_size() // 2), ("replicate", "shard"))


def tensor_parallel() -> Tensors:
    """Column-parallel, then row-parallel."""
    mesh, model = device_mesh((dist.get_world_size(),), ("tp",)), copy.deepcopy(BASE)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return full(train(model, INPUTS, TARGETS))


def spmd() -> Tensors:
    """One program on DTensors."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    model = distribute_module(copy.deepcopy(BASE), mesh)
    sharded = [[distribute_tensor(batch, mesh, [Shard(0)]) for batch in batches] for batches in (INPUTS, TARGETS)]
    return full(train(model, *sharded))


@pytest.fixture(scope="module")
def reference() -> Tensors:
    """Parameters after the single-device training."""
    return full(train(copy.deepcopy(BASE), INPUTS, TARGETS))


CASES = [
    (ddp, 2),
    (ddp, 4),
    (ddp_small_buckets, 2),
    (ddp_find_unused, 2),
    (ddp_static_graph, 2),
    (ddp_with_hook, 2),
    (fsdp1, 2),
    (fsdp1, 4),
    (fsdp1_grad_only, 2),
    (fsdp2, 2),
    (fsdp2, 4),
    (fsdp2_in_memory_of_the_group, 2),
    (hsdp, 4),
    (tensor_parallel, 2),
    (tensor_parallel, 4),
    (spmd, 2),
    (spmd, 4),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("layout", "size"), CASES, ids=[f"{layout.__name__}-{size}" for layout, size in CASES])
def test_equals_one_device_bit_for_bit_repeatable(
    world: World, reference: Tensors, layout: Callable[[], Tensors], size: int
) -> None:
    """A correct layout trains to the reference's parameters, and to the same bits twice, under any schedule."""
    first, again, other = (world(size).run(layout, schedule_seed=seed) for seed in (0, 0, 3))
    for parameters in first.values:
        for parameter, expected in zip(parameters, reference, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-13)
    for repeated in (again, other):
        assert repeated.calls == first.calls
        for mine_, theirs in zip(first.values, repeated.values, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(mine_, theirs, strict=True))


def test_ddp_buckets_overlap(world: World) -> None:
    """DDP issues every bucket before it waits for the first, so ranks switch once a backward and not once a bucket."""

    def program() -> None:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(BASE), bucket_cap_mb=1e-4, init_sync=False)
        hidden.append([])
        model.register_comm_hook(None, watch)
        model(INPUTS[0]).sum().backward()

    hidden: list[list[bool]] = []

    def watch(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        hidden[-1].append(bool(bucket.buffer().isnan().all()))
        return future.then(lambda done: done.value()[0])

    world(2).run(program)
    assert hidden[0]
    assert all(hidden[0])
