"""`clip_grad_norm_` with the infinity norm raises on a rank whose shard of a gradient is empty, and the other ranks wait.

The error is that of https://github.com/pytorch/pytorch/pull/173238. Nothing is wrong with the gradient: it has fewer rows than
ranks, which `fully_shard` allows, and all other norms are computed.

    torchrun --standalone --nproc-per-node 2 inf_norm_of_empty_shard.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> int:
    """Clip the gradient of a weight of one row on two ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(1, 2)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    print("norm", float(norm.full_tensor()))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
