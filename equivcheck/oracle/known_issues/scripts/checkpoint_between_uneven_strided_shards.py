"""A checkpoint of `fully_shard` over tensor parallelism gives other ranks wrong rows, where both cut the same dim and not evenly.

DTensor works out other sizes and offsets for strided shards than `fully_shard` gives the ranks: of 13 rows over 3 x 2 ranks, one
rank is given the eighth row for the seventh, and another the last two at the place of the last.

    torchrun --standalone --nproc-per-node 6 checkpoint_between_uneven_strided_shards.py

Exit code 1 when a difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

ROWS = torch.arange(13.0).reshape(13, 1)


def sharded(values: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A weight cut by rows twice."""
    linear = nn.Linear(1, 13, bias=False)
    with torch.no_grad():
        linear.weight.copy_(values)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    return fully_shard(linear, mesh=mesh["dp"]).weight.detach()


def main() -> int:
    """Save the weight from 4 ranks, and load it into 6."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    four = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    six = DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("dp", "tp"))
    savers = dist.new_group(list(range(4)))
    expected, loaded = sharded(ROWS, six), sharded(torch.zeros_like(ROWS), six)
    with TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        if dist.get_rank() < 4:
            dcp.save({"weight": sharded(ROWS, four)}, checkpoint_id=folders[0], process_group=savers)
        dist.barrier()
        dcp.load({"weight": loaded}, checkpoint_id=folders[0])
        dist.barrier()
    difference = (loaded.to_local() - expected.to_local()).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"max difference {float(difference)}")
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
