"""Before torch 2.12, `PipelineStage` also compares strides of dims of size 1. `DTensor.to_local` changes them if autograd
records it, but the forward that infers shapes runs in `no_grad`. So a slice of a single row's positions is refused.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run two chunks whose positions two tensor-parallel ranks share: with two rows each, then with one row each."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank = mesh["pp"].get_local_rank()
    for rows in (4, 2):
        plan = ColwiseParallel(output_layouts=Shard(1))
        layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], plan) if rank == 0 else nn.Linear(4, 4)
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
        schedule.step(*([torch.ones(rows, 4, 4)] if rank == 0 else []), target=torch.ones(rows, 2, 4) if rank else None)
        print("rows in two chunks:", rows)
