"""In the first forward, DDP builds DTensors from its local parameters. They stay in the module as plain attributes, so later
forwards use them, too. If the first forward runs in `torch.no_grad`, such as an evaluation before training, they have no autograd
graph, and no step computes gradients for parameters.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def main() -> float:
    """Evaluate a module, then run a backward. Return the error of the bias's gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(nn.Linear(2, 2), mesh["tp"], ColwiseParallel())
    wrapped = DistributedDataParallel(module, device_mesh=mesh["dp"])
    bias = module.get_parameter("bias")
    with torch.no_grad():
        wrapped(torch.ones(3, 2))
    wrapped(torch.ones(3, 2, requires_grad=True)).sum().backward()  # the inputs' gradient keeps torch from raising
    gradient = torch.zeros(2) if bias.grad is None else bias.grad.full_tensor()
    return float((gradient - 3).abs().max())
