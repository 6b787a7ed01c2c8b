"""``mse_loss(..., reduction="mean")`` over a DTensor in uneven shards is the mean of the ranks' means, each counted alike.

    torchrun --standalone --nproc-per-node 2 dtensor_mse_loss_mean_uneven.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss


def main() -> int:
    """Compare the loss on one device with that of the sharded tensor."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    whole = torch.arange(2.0 * size - 1)
    expected = mse_loss(whole, torch.zeros_like(whole))
    values, zeros = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (whole, torch.zeros_like(whole)))
    found = mse_loss(values, zeros).full_tensor()
    if dist.get_rank() == 0:
        print("one device:", expected.item(), "sharded:", found.item())
        print("max difference", (found - expected).abs().item())
    dist.barrier()
    dist.destroy_process_group()
    return int(not torch.allclose(found, expected))


if __name__ == "__main__":
    sys.exit(main())
