"""The gradient that `to_local` returns to a DTensor has the strides of the local gradient; those of an expanded sum are 0.
Autograd then copies the gradient into a new tensor of the full shape, which DTensor replicates by an all-gather on this
rank only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> None:
    """Compute the gradient of a loss on each rank's local shard. The second rank's shard is empty."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]))
    local = weight.to_local()
    (local.square() if local.numel() else local).sum().backward()
    dist.barrier()
    assert weight.grad is not None
    print("gradient", weight.grad.placements, tuple(weight.grad.to_local().shape))
