"""A stage behind the first that is given no shapes infers them by a backward through DDP. With `static_graph`, DDP takes this
backward for its first iteration, and reduces nothing in the first step.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS
from torch.nn.parallel import DistributedDataParallel


def main() -> float:
    """Run one step of one chunk on two pipeline stages, each replicated by DDP over two ranks."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, row = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    layers, loss = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.MSELoss(reduction="sum")
    whole, inputs, targets = deepcopy(layers), torch.randn(8, 2), torch.randn(8, 2)
    loss(whole[1](whole[0](inputs)), targets).backward()

    module = DistributedDataParallel(layers[pp], process_group=mesh["dp"].get_group(), static_graph=True)
    stage = PipelineStage(module, pp, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleLoopedBFS([stage], 1, loss_fn=loss, scale_grads=False)
    schedule.step(*([inputs.chunk(2)[row]] if pp == 0 else []), target=targets.chunk(2)[row] if pp == 1 else None)

    largest = (whole[pp].weight.grad - layers[pp].weight.grad * 2).abs().max()  # DDP averages
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
