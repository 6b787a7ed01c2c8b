"""`fully_shard` over tensor parallelism shards dim 0 twice. DTensor computes other sizes for such strided shards than
`fully_shard` uses. If 7 rows are sharded over 3 x 2 ranks, DTensor expects a row on a rank that has none, and none on a rank that
has one.
"""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Save the full weight and load it into shards."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 7, bias=False), mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    with TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        dcp.save({"weight": torch.arange(7.0).reshape(7, 1)}, checkpoint_id=folders[0])
        dcp.load({"weight": linear.weight}, checkpoint_id=folders[0])
        dist.barrier()
