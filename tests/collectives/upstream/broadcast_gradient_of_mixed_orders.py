"""The gradient of nn.broadcast is wrong where one rank uses the output transposed: it is reduced as it lies in memory.

torchrun --standalone --nproc-per-node 2 broadcast_gradient_of_mixed_orders.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn


def max_difference() -> float:
    """Of the gradient at the source, which is the sum of the weights of both ranks."""
    given, weight = torch.ones(2, 3, requires_grad=True), torch.arange(6.0).view(2, 3)
    sent = nn.broadcast(given, 0)
    loss = (weight * sent).sum() if dist.get_rank() == 0 else (weight.t().contiguous() * sent.t()).sum()
    loss.backward()
    return (given.grad - (2 - 2 * dist.get_rank()) * weight).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
