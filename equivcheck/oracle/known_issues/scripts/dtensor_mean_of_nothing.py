"""The mean of a DTensor of which a rank holds nothing is NaN: the ranks' means are averaged.

Reported as https://github.com/pytorch/pytorch/issues/162692.

    torchrun --standalone --nproc-per-node 3 dtensor_mean_of_nothing.py

Exit code 1 when the difference shows. Seen on torch 2.9, CPU, gloo; right on 2.10.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> int:
    """Compare the mean on one device with that of the sharded tensor."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    whole = torch.arange(float(dist.get_world_size() - 1))
    expected = whole.mean()
    found = distribute_tensor(whole, mesh, [Shard(0)]).mean().full_tensor()
    if dist.get_rank() == 0:
        print("one device:", expected.item(), "sharded:", found.item())
        print("max difference", (found - expected).abs().item())
    dist.barrier()
    dist.destroy_process_group()
    return int(not torch.allclose(found, expected))


if __name__ == "__main__":
    sys.exit(main())
