"""A pending gradient of what becomes of Partial("avg"), "max" or "min" raises: its addends are taken for the tensor's.

torchrun --standalone --nproc-per-node 2 pending_gradient_of_a_mean.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def max_difference() -> float:
    """Of the gradient of a mean, if it has one: each rank's addend of it is one, and each rank gets an n-th of their sum."""
    addend = torch.ones(1, requires_grad=True)
    mean = DTensor.from_local(addend, init_device_mesh("cpu", (dist.get_world_size(),)), [Partial("avg")])
    mean.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()
    return abs(addend.grad.item() - 1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
