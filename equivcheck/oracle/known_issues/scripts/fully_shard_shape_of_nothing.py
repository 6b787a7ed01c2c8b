"""`fully_shard` over tensor parallelism leaves a weight in the wrong shape on a rank that holds none of its columns.

With one rank to shard over, such a rank should have all rows and no column. It has no row either, and `full_tensor()` gathers
parts of unequal sizes: a rank waits for more than it is sent. `replicate` of the same package does the same.

    torchrun --standalone --nproc-per-node 2 fully_shard_shape_of_nothing.py

Exit code 1 when it fails. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> int:
    """Wrap a linear with one input, row-parallel over two ranks, and put its weight together."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 1, bias=False), mesh["tp"], RowwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    print(f"rank {dist.get_rank()}: {tuple(linear.weight.to_local().shape)} of {linear.weight.placements}", flush=True)
    full = linear.weight.full_tensor()
    dist.barrier()  # for the rank that still waits, to say so
    dist.destroy_process_group()
    return int(full.shape != linear.weight.shape)


if __name__ == "__main__":
    sys.exit(main())
