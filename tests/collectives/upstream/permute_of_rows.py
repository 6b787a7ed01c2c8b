"""permute_tensor raises for tensors of two dims: it counts elements where rows are exchanged.

torchrun --standalone --nproc-per-node 2 permute_of_rows.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def max_difference() -> float:
    """Of what a rank has from the other."""
    received = functional.permute_tensor(torch.ones(2, 3), [1, 0], dist.group.WORLD)
    return (received - 1).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
