"""`FullyShardedDataParallel` with HYBRID_SHARD on a mesh of (replicas, 1) never averages gradients over the replicas.

With one rank along the axis of shards it switches to NO_SHARD, but keeps that axis as the group to reduce over.

    torchrun --standalone --nproc-per-node 2 fsdp1_hybrid_shard_of_one.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def main() -> int:
    """Compare the gradient of each replica with the mean over all of them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
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
    if rank == 0:
        print("max difference", float(difference))
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
