"""DDP decides in the forward whether the next backward reduces. The documentation asks for the forward under the context
manager, but does not say that a backward outside of it is not reduced either.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> float:
    """Run forward under `no_sync` and backward outside, and compare the gradient with the mean over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))

    with model.no_sync():
        loss = model(torch.full((1, 1), float(rank + 1))).sum()
    loss.backward()

    expected = sum(range(1, size + 1)) / size
    difference = abs(float(model.module.weight.grad) - expected)
    print(f"rank {rank}: gradient {float(model.module.weight.grad)}, mean over ranks {expected}")
    return difference
