"""The backward of a `ColwiseParallel` linear with one output and a bias raises on a mesh of one rank.

The gradient of the bias has shape (1, 1), sharded along dim 1, and its view as (1,) is refused. With two outputs, or on two
ranks, or without a bias it works.

    torchrun --standalone --nproc-per-node 1 colwise_parallel_of_one.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Run the backward for two outputs, then for one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for outputs in (2, 1):
        linear = parallelize_module(nn.Linear(3, outputs), mesh, ColwiseParallel())
        linear(torch.ones(2, 3)).sum().backward()
        print(outputs, "outputs: gradient of the bias", linear.bias.grad.full_tensor().tolist())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
