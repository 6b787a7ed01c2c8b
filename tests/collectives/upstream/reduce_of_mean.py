"""The gradient of nn.reduce, and that of nn.reduce_scatter, is not divided by the number of ranks for a mean.

torchrun --standalone --nproc-per-node 2 reduce_of_mean.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the gradient of a mean of two, which is a half."""
    given = torch.ones(2, requires_grad=True)
    nn.reduce(given, 0, dist.ReduceOp.AVG).sum().backward()
    return (given.grad - 0.5).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
