"""`fully_shard` over tensor parallelism cannot reduce the gradient of a parameter on a rank that holds nothing of it.

    torchrun --standalone --nproc-per-node 2 fsdp2_reduces_nothing.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Backward of a linear with one output, column-parallel over two ranks: the second has no row."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    linear = parallelize_module(nn.Linear(2, 1), mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    linear(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
