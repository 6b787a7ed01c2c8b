"""`fully_shard` cannot gather for backward what is cut along its last dim and resharded to fewer ranks after forward.

What is kept between forward and backward is one dim of elements; the copy out of the all-gather asks it for the size of dim 1. Of
an uneven first dim it is not even kept ('setStorage: sizes ... are out of bounds').

    torchrun --standalone --nproc-per-node 4 fsdp2_reshards_last_dim.py

Exit code 1 when it raises. Seen on torch 2.9 to 2.15, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def main() -> int:
    """Go forward and backward through one linear."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1), reshard_after_forward=2)
    loss = model(torch.ones(1, 4)).sum()
    print("forward", loss)
    loss.backward()
    print("backward")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
