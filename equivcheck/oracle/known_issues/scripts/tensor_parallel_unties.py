"""Each module gets a new parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def tied() -> nn.Sequential:
    """Two linears with one weight."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight = nn.Parameter(torch.ones(2, 2))
    return model


def main() -> float:
    """Compare the shared weight's gradient with the one in a plain model."""
    plain, parallel = tied(), tied()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for model in (plain, parallel):
        model(torch.ones(1, 2)).sum().backward()

    difference = float((parallel[0].weight.grad.full_tensor() - plain[0].weight.grad).abs().max())
    print("parameters:", len(list(plain.parameters())), "and, parallelized,", len(list(parallel.parameters())))
    return difference
