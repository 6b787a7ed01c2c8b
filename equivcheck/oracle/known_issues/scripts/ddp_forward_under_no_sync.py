"""A forward under ``no_sync`` whose backward runs outside of it leaves gradients that differ between ranks, silently.

DDP decides in the forward whether the next backward reduces, so where the backward runs does not matter. The documentation says
that the forward belongs under the context manager; that a backward outside is not reduced either, it does not say.

    torchrun --standalone --nproc-per-node 2 ddp_forward_under_no_sync.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Compare the gradient of such a backward with the mean over ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))

    with model.no_sync():
        loss = model(torch.full((1, 1), float(rank + 1))).sum()
    loss.backward()

    expected = sum(range(1, size + 1)) / size
    difference = abs(float(model.module.weight.grad) - expected)
    print(f"rank {rank}: gradient {float(model.module.weight.grad)}, mean over ranks {expected}")
    print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
