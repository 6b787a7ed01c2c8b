"""A coalesced reduce-scatter that is waited for by its method raises over gloo, which makes a view in a thread.

Before torch 2.11 it has no backward, and leaves no gradient.

torchrun --standalone --nproc-per-node 2 waited_coalesced_reduce_scatter.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def max_difference() -> float:
    """Of the gradient of the sum, which is three."""
    names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    scatter = next(getattr(functional, name) for name in names if hasattr(functional, name))
    given = torch.ones(2, requires_grad=True)
    parts = scatter([given, 2 * given], "sum", [0, 0], dist.group.WORLD)
    waited = [part.wait() for part in parts]
    (torch.cat(waited).sum() + 0 * given.sum()).backward()
    return (given.grad - 3).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
