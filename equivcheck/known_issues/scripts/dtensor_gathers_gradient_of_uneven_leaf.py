"""The backward of `to_local()` hangs for a leaf in uneven shards.

Ranks whose part is smaller than the first one's take its gradient to be laid out otherwise than the leaf, and gather it to lay it
out anew; the others do not. Reported as https://github.com/pytorch/pytorch/issues/107661, mended in 2.12.

    torchrun --standalone --nproc-per-node 4 dtensor_gathers_gradient_of_uneven_leaf.py

Exit code 1 when a rank waits in vain. Seen on torch 2.9 to 2.11, CPU, gloo; right on 2.12.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> int:
    """Differentiate a tensor of two rows on four ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    leaf = distribute_tensor(torch.ones(2, 9), mesh, [Shard(0)]).requires_grad_()
    leaf.to_local().sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
