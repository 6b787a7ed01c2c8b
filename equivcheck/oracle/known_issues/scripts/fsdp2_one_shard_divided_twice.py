"""It divides in place of the reduce-scatter, which one rank does not need (since
https://github.com/pytorch/pytorch/pull/167178), and again after it, as for any sum.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTOR = 4.0


def main() -> float:
    """Set a gradient divide factor, and compare the gradient of a sum with 1 / `FACTOR`."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_gradient_divide_factor(FACTOR)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(1, 1)).sum().backward()

    gradient, expected = float(model.weight.grad.full_tensor()), 1 / FACTOR
    print(f"gradient {gradient}, expected {expected}")
    return abs(gradient - expected)
