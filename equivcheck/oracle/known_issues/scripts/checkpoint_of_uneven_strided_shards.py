"""A checkpoint of `fully_shard` over tensor parallelism cannot be loaded where both cut the same dim, and not evenly.

DTensor works out other sizes for strided shards than `fully_shard` gives the ranks: of 7 rows over 3 x 2 ranks, one for a rank
that has none, and none for one that has one.

    torchrun --standalone --nproc-per-node 6 checkpoint_of_uneven_strided_shards.py

Exit code 1 when loading raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Save the weight whole, and load it into shards."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 7, bias=False), mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    with TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        dcp.save({"weight": torch.arange(7.0).reshape(7, 1)}, checkpoint_id=folders[0])
        dcp.load({"weight": linear.weight}, checkpoint_id=folders[0])
        dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
