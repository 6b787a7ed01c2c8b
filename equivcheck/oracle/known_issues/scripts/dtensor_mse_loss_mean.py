"""The forward is right: the loss is a `Partial(avg)`. The backward divides by the number of local elements."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import mse_loss


def main() -> float:
    """Compare the gradient of `mse_loss` on plain tensors with the gradient on sharded DTensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    whole = torch.arange(2.0 * size).reshape(2 * size, 1).requires_grad_()
    mse_loss(whole, torch.zeros_like(whole)).backward()

    rows = whole.detach()[2 * rank : 2 * rank + 2]
    sharded = DTensor.from_local(rows, mesh, [Shard(0)]).requires_grad_()
    mse_loss(sharded, DTensor.from_local(torch.zeros_like(rows), mesh, [Shard(0)])).backward()

    gradient = sharded.grad.full_tensor()
    difference = float((gradient - whole.grad).abs().max())
    if rank == 0:
        print("one device:", whole.grad.flatten().tolist())
        print("sharded:   ", gradient.flatten().tolist())
    return difference
