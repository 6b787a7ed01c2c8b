"""A functional all-gather of one row along dim 1 loses its gradient if it is waited for by its method.

torchrun --standalone --nproc-per-node 2 waited_view_of_a_gather.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def max_difference() -> float:
    """Of the gradient of the sum on two ranks, which is two."""
    gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    given = torch.ones(1, 2, requires_grad=True)
    gathered = gather(given, 1, dist.group.WORLD)
    waited = gathered.wait() if isinstance(gathered, functional.AsyncCollectiveTensor) else gathered
    (waited.sum() + 0 * given.sum()).backward()
    return (given.grad - 2).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
