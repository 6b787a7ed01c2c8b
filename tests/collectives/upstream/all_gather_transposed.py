"""The gradient of nn.all_gather is wrong if its output is used transposed: the backward scatters into tensors of that order.

torchrun --standalone --nproc-per-node 2 all_gather_transposed.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the gradient of a weighted sum of transposed outputs."""
    given, weight = torch.ones(2, 3, requires_grad=True), torch.arange(6.0).view(3, 2)
    sum((weight * part.t()).sum() for part in nn.all_gather(given)).backward()
    return (given.grad - 2 * weight.t()).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
