"""DTensor cannot add a sharded tensor in place to one that is pending a sum.

Autograd adds the gradient of one microbatch to that of another so. Which placement a gradient has depends on the sizes of what
it is computed from: where nothing redistributes it, it may be a shard for one microbatch and pending a sum for another.

    torchrun --standalone --nproc-per-node 2 shards_not_added_to_pending.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard


def main() -> int:
    """Add ones in shards to ones of which every rank has a part of the sum."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))
    pending = DTensor.from_local(torch.ones(2, 2), mesh, (Partial(),))
    pending += DTensor.from_local(torch.ones(1, 2), mesh, (Shard(0),))
    sums = pending.full_tensor()
    dist.destroy_process_group()
    return int(not torch.equal(sums, torch.full((2, 2), 3.0)))


if __name__ == "__main__":
    sys.exit(main())
