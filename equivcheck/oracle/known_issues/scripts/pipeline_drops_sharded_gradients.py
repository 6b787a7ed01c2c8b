"""A schedule infers shapes in its first step, by a forward and backward of the stage. Then it sets the gradients of all FSDP
modules to None, including those that another schedule has accumulated.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe


def main() -> float:
    """Accumulate gradients of microbatches of 2 and of 4 rows, with a schedule for each size."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    module, loss = nn.Linear(2, 2), nn.MSELoss(reduction="sum")
    whole = deepcopy(module)
    fully_shard(module, mesh=mesh["dp"])

    for inputs in (torch.randn(4, 2), torch.randn(8, 2)):
        loss(whole(inputs), torch.zeros_like(inputs)).backward()
        own = inputs.chunk(2)[dist.get_rank()]
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
        ScheduleGPipe(stage, 1, loss_fn=loss, scale_grads=False).step(own, target=torch.zeros_like(own))

    actual = module.weight.grad.full_tensor() * 2  # FSDP averages
    return float((whole.weight.grad - actual).abs().max())
