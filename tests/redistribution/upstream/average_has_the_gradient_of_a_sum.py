"""The gradient of what becomes of Partial("avg"), "max" or "min" is that of a sum: each rank gets the result's gradient whole.

torchrun --standalone --nproc-per-node 2 average_has_the_gradient_of_a_sum.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def max_difference() -> float:
    """Of the gradient of a mean, which gives each rank an n-th."""
    size = dist.get_world_size()
    addend = torch.ones(1, requires_grad=True)
    mean = DTensor.from_local(addend, init_device_mesh("cpu", (size,)), [Partial("avg")])
    mean.redistribute(placements=[Replicate()]).to_local().sum().backward()
    return abs(addend.grad.item() - 1 / size)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
