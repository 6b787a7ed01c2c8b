"""With `dp_mesh_dims`, `fully_shard` reduces local gradients whatever their placements along the data-parallel axes. The gradient
of a sum is the same for all rows, so DTensor keeps that of the last bias replicated, and the reduction adds its copies.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module


def main() -> float:
    """Compute the gradient of a bias for a sum over all rows, and compare it with the number of rows."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = nn.Linear(1, 1)
    distribute_module(model, mesh)  # all parameters are replicated
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    model.set_gradient_divide_factor(1.0)  # the loss is that of all rows
    model.set_force_sum_reduction_for_comms(True)
    model(DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])).sum().backward()

    gradient = float(model.bias.grad.full_tensor())
    print(f"gradient {gradient}, expected {float(size)}")
    return abs(gradient - size)
