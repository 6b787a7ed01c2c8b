"""`clip_grad_value_` raises where no parameter has a gradient; `clip_grad_norm_` does not.

One process is enough: ``torch.nn.utils.clip_grad_value_([torch.nn.Parameter(torch.ones(1))], 1.0)``. It comes up on ranks of
`FullyShardedDataParallel` that hold no part of any parameter.

    torchrun --standalone --nproc-per-node 2 clip_grad_value_of_nothing.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> int:
    """Clip the gradient of a model with one weight, which only rank 0 holds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(1, 1)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
