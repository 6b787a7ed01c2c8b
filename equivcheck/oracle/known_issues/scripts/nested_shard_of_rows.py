"""Gathering a DTensor placed ``[Shard(0), Shard(0)]`` loses rows that do not divide evenly over a mesh that has been flattened.

Nested sharding cuts 5 rows over a 2x2 mesh into 2, 1, 1, 1. Redistributing to `Replicate` goes through one all-gather over the
flattened submesh, which takes the shards for those of a flat split, 2, 2, 1, 0: the last row is lost and padding comes in its
place. No error is raised. Reported as https://github.com/pytorch/pytorch/pull/194457.

    torchrun --standalone --nproc-per-node 4 nested_shard_of_rows.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main() -> int:
    """Distribute five rows and gather them again."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    mesh["outer", "inner"]._flatten("all")

    rows = torch.arange(1.0, 6.0)
    sharded = distribute_tensor(rows, mesh, [Shard(0), Shard(0)])
    gathered = sharded.redistribute(placements=[Replicate(), Replicate()]).to_local()

    difference = float((gathered - rows).abs().max())
    if dist.get_rank() == 0:
        print("distributed:", rows.tolist())
        print("gathered:   ", gathered.tolist())
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
