"""`DistributedDataParallel` with `static_graph` fails an internal assertion when its first backward runs under `no_sync`.

Accumulating gradients does just that: https://github.com/pytorch/pytorch/issues/143580, and
https://github.com/pytorch/pytorch/pull/187732 for a fix.

    torchrun --standalone --nproc-per-node 2 ddp_static_graph_no_sync.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Accumulate the gradients of two microbatches."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
