"""`FullyShardedDataParallel.clip_grad_norm_` raises for float64 gradients, and only on ranks that hold any: the others wait.

It asks for norms in float32, which `torch.linalg.vector_norm` refuses to narrow to. A rank that holds no gradient goes on to the
all-reduce alone.

    torchrun --standalone --nproc-per-node 2 fsdp1_norm_of_doubles.py

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
    linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = FullyShardedDataParallel(linear, device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    print("norm", float(model.clip_grad_norm_(1.0)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
