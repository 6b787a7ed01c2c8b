"""With one rank along the shard axis, FSDP1 switches to NO_SHARD but keeps that axis as the group to reduce over."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main() -> float:
    """Run backward with one shard and several replicas, and compare the gradient with the mean over replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))

    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    model(torch.full((1, 1), rank + 1.0)).sum().backward()

    (parameter,) = model.parameters()
    gradient, mean = float(parameter.grad), (size + 1) / 2
    difference = torch.tensor(abs(gradient - mean))
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    print(f"rank {rank}: gradient {gradient}, mean over ranks {mean}")
    return float(difference)
