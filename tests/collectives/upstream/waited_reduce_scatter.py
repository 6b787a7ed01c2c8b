"""A reduce-scatter with a backward that is waited for by its method leaves gradients of zero.

torchrun --standalone --nproc-per-node 2 waited_reduce_scatter.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def max_difference() -> float:
    """Of the gradient of a sum, which is one."""
    given = torch.ones(2, requires_grad=True)
    scattered = functional.reduce_scatter_tensor_autograd(given, "sum", 0, dist.group.WORLD)
    torch.dot(scattered.wait(), torch.ones(1)).backward()
    return (given.grad - 1).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
