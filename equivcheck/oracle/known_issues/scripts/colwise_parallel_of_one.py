"""The gradient of the bias has shape (1, 1) and is sharded along dim 1, so its view as (1,) is refused. It works with two
outputs, on two ranks, or without a bias.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run backward through a column-parallel linear with two outputs, then with one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for outputs in (2, 1):
        linear = parallelize_module(nn.Linear(3, outputs), mesh, ColwiseParallel())
        linear(torch.ones(2, 3)).sum().backward()
        print(outputs, "outputs: gradient of the bias", linear.bias.grad.full_tensor().tolist())
