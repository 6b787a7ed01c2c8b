"""The gradient of ``mse_loss(..., reduction="mean")`` over a sharded DTensor is too large by the number of ranks.

The forward is right: the loss is a `Partial(avg)`. The backward divides by the number of local elements instead of all.

    torchrun --standalone --nproc-per-node 2 dtensor_mse_loss_mean.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import mse_loss


def main() -> int:
    """Compare the gradient on one device with that of the sharded tensor."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
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
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
