"""nn.gather, and nn.scatter, raise in a group of later ranks: the rank within the group is compared with a global one.

torchrun --standalone --nproc-per-node 2 gather_in_a_later_group.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of what rank 1 gathers from itself."""
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return 0.0
    (gathered,) = nn.gather(torch.ones(2), 1, group)
    return (gathered - 1).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
