"""Each forward prepares the reduction in the next backward, but GPipe runs the forwards of all chunks before any backward. So the
first chunk's gradients are averaged over the ranks, and each rank adds its own gradients of the other chunks.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe


def main() -> float:
    """Run one step of two chunks on a stage that two ranks replicate."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    module, loss = nn.Linear(2, 2), nn.MSELoss(reduction="sum")
    whole, inputs = deepcopy(module), torch.randn(8, 2)
    loss(whole(inputs), torch.zeros_like(inputs)).backward()

    own = inputs.chunk(2)[dist.get_rank()]
    replicate(module, device_mesh=mesh["dp"])
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    ScheduleGPipe(stage, 2, loss_fn=loss, scale_grads=False).step(own, target=torch.zeros_like(own))
    return float((whole.weight.grad - module.weight.grad * 2).abs().max())  # replicate averages
