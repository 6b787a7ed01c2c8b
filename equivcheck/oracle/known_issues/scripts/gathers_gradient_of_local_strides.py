"""A rank whose local gradient has strides of its own gathers it in backward, alone, and waits for ranks that do not.

What `to_local` gives a DTensor back as gradient has the strides of the local one: those of an expanded sum are 0. Autograd then
copies the gradient into a new tensor of the parameter's strides, which DTensor replicates, as its shape is the whole one.

    torchrun --standalone --nproc-per-node 2 gathers_gradient_of_local_strides.py

Exit code 1 when it fails. Seen on torch 2.9, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> int:
    """Differentiate a function of the local shard, which is empty on the second rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]))
    local = weight.to_local()
    (local.square() if local.numel() else local).sum().backward()
    dist.barrier()
    assert weight.grad is not None
    print("gradient", weight.grad.placements, tuple(weight.grad.to_local().shape))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
