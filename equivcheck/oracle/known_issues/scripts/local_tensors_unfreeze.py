"""`_flatten_tensor` gives them the local tensors of DTensors and makes those require gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def main() -> float:
    """Train one step with a frozen linear in DDP over tensor parallelism, and return how much the linear changed."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    frozen = model[0].weight.detach().to_local().clone()
    model[0].requires_grad_(False)  # again, because parallelize_module makes it trainable before torch 2.11
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
    weight = model[0].weight
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    difference = float((weight.detach() - frozen).abs().max())
    print("requires_grad, expected False:", weight.requires_grad)
    return difference
