"""`fully_shard` over tensor parallelism shards dim 0 twice. DTensor computes other sizes and offsets for such strided shards than
`fully_shard` uses. If 13 rows are sharded over 3 x 2 ranks, one rank gets the eighth row instead of the seventh. Another rank
gets the last two rows instead of only the last.
"""

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
    """Shard a weight by rows twice."""
    linear = nn.Linear(1, 13, bias=False)
    with torch.no_grad():
        linear.weight.copy_(values)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    return fully_shard(linear, mesh=mesh["dp"]).weight.detach()


def main() -> float:
    """Save the weight from 4 ranks and load it into 6."""
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
    return float(difference)
