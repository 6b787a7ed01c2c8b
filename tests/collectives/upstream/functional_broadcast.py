"""A functional broadcast has no backward of its own: gradients stay where they are, or are lost.

torchrun --standalone --nproc-per-node 2 functional_broadcast.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def max_difference() -> float:
    """Of the gradient at the source, which is two, and elsewhere, where it is none."""
    given = torch.ones(2, requires_grad=True)
    (functional.broadcast(given, 0, dist.group.WORLD) + 0 * given).sum().backward()
    return (given.grad - (2 - 2 * dist.get_rank())).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
