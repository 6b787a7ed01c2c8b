"""nn.scatter gives wrong values of parts that are columns of one tensor, as they are scattered as they lie in memory.

torchrun --standalone --nproc-per-node 2 scatter_of_columns.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the part that a rank receives."""
    given = torch.arange(12.0).view(3, 4)
    received = nn.scatter(list(given.chunk(2, dim=1)), 0)
    return (received - given.chunk(2, dim=1)[dist.get_rank()]).abs().nan_to_num(1).max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
