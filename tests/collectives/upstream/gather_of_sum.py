"""The gradient of a sum of what nn.gather gives is wrong: an expanded tensor is scattered as it lies in memory.

torchrun --standalone --nproc-per-node 2 gather_of_sum.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the gradient of the sum of all gathered elements, which is one for each."""
    given = torch.ones(4, requires_grad=True)
    scale = torch.arange(1.0, 3.0)  # rank r has gradient r + 1
    gathered = nn.gather(given, dst=0)
    sum(scale[rank] * part.sum() for rank, part in enumerate(gathered)).backward()
    return (given.grad - scale[dist.get_rank()]).abs().nan_to_num(1).max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
