"""With one rank to shard over, such a rank should have all rows and no column. `fully_shard` leaves it no row either, so
`full_tensor()` gathers parts of unequal sizes, and a rank waits for more than it is sent. `replicate` does the same.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> None:
    """Wrap a linear with one input, row-parallel over two ranks, and gather its weight."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 1, bias=False), mesh["tp"], RowwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    print(f"rank {dist.get_rank()}: {tuple(linear.weight.to_local().shape)} of {linear.weight.placements}", flush=True)
    full = linear.weight.full_tensor()
    print("full shape", tuple(full.shape))
