"""`parallelize_module` unties shared weights, silently: each module gets a new parameter.

    torchrun --standalone --nproc-per-node 1 tensor_parallel_unties.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

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


def main() -> int:
    """Compare the gradient of the shared weight with that of a plain model."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    plain, parallel = tied(), tied()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for model in (plain, parallel):
        model(torch.ones(1, 2)).sum().backward()

    difference = float((parallel[0].weight.grad.full_tensor() - plain[0].weight.grad).abs().max())
    print("parameters:", len(list(plain.parameters())), "and, parallelized,", len(list(parallel.parameters())))
    print("max difference", difference)
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
