"""Without ``use_orig_params``, FSDP1 accumulates wrong gradients for a flat parameter of one element.

Before each backward it looks at the size of the gradient that is there: one as large as the whole flat parameter has been
accumulated under ``no_sync``, one as large as a shard has been reduced. With one element both are one, so the reduced gradient of
the first microbatch is added to the local one of the second, and reduced with it again.

    torchrun --standalone --nproc-per-node 2 fsdp1_accumulates_one_element.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> int:
    """Accumulate the gradient of one weight over two microbatches."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=False)

    for _ in range(2):
        model(torch.full((1, 1), float(rank + 1))).sum().backward()

    expected = 2 * sum(range(1, size + 1)) / size
    gradient = float(next(model.parameters()).grad)
    difference = abs(gradient - expected) if rank == 0 else 0.0
    if rank == 0:
        print("expected", expected, "but accumulated", gradient)
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
