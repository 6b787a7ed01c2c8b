"""nn.broadcast gives wrong values, and nn.reduce, where a tensor is transposed on one rank and not on the other.

torchrun --standalone --nproc-per-node 2 broadcast_of_mixed_orders.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of what rank 1 has from rank 0."""
    given = torch.arange(6.0).view(2, 3)
    received = nn.broadcast(given if dist.get_rank() == 0 else given.t().contiguous().t(), 0)
    return (received - given).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
