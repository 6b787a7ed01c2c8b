"""The gradient of nn.all_reduce of a maximum is the maximum of the gradients.

torchrun --standalone --nproc-per-node 2 all_reduce_of_maximum.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the gradient of a maximum that rank 1 has, used twice on each rank."""
    given = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    (2 * nn.all_reduce(given, dist.ReduceOp.MAX)).sum().backward()
    return (given.grad - 4 * dist.get_rank()).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
