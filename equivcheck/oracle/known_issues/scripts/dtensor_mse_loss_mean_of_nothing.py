"""``mse_loss(..., reduction="mean")`` over a DTensor of which a rank holds nothing is NaN: that rank's mean is 0 / 0.

    torchrun --standalone --nproc-per-node 3 dtensor_mse_loss_mean_of_nothing.py

Exit code 1 when NaN shows. Seen on torch 2.13, CPU, gloo.
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

    whole = torch.arange(1.0 * size + 1)
    expected = mse_loss(whole, torch.zeros_like(whole))
    values, zeros = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (whole, torch.zeros_like(whole)))
    found = mse_loss(values, zeros).full_tensor()
    if dist.get_rank() == 0:
        print("one device:", expected.item(), "sharded:", found.item())
        print("max difference", abs(found - expected).item())
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(found.isnan()))


if __name__ == "__main__":
    sys.exit(main())
