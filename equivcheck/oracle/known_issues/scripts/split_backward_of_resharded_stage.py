"""`stage_backward_input` looks for the stage's parameters in the autograd graph. After resharding they are shards, but the graph
has the full parameters of the forward.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


def main() -> float:
    """Train two pipeline stages, each with FSDP2 over one rank and resharded after forward."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    torch.manual_seed(0)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    layers, loss = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.MSELoss(reduction="sum")
    whole, inputs, targets = deepcopy(layers), torch.randn(4, 2), torch.randn(4, 2)
    loss(whole[1](whole[0](inputs)), targets).backward()
    fully_shard(layers[rank], mesh=mesh["dp"], reshard_after_forward=True)

    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=loss, scale_grads=False)
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == 1 else None)

    gradient = layers[rank].weight.grad
    difference = whole[rank].weight.grad - (0 if gradient is None else gradient.to_local())
    largest = difference.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
