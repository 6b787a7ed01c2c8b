"""The new DTensors do not take over `requires_grad`. `SequenceParallel` still does so in later versions."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> float:
    """Train one step with `ColwiseParallel` on a frozen linear, and return how much the linear changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    weight = model[0].weight
    before = weight.detach().to_local().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    difference = float((weight.detach().to_local() - before).abs().max())
    print("requires_grad, expected False:", weight.requires_grad)
    return difference
