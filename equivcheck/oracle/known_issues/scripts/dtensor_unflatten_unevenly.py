"""A linear with a weight sharded by rows leaves its output cut by features; viewing those as two dims may then be refused.

Propagation cuts the output rather than gather the weight, and DTensor redistributes nothing for a view: of two dims that a cut
dim is viewed as, the first must be a multiple of the ranks.

    torchrun --standalone --nproc-per-node 3 dtensor_unflatten_unevenly.py

Exit code 1 when the error shows. Seen on torch 2.9 and 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear


def main() -> int:
    """Run a linear on a batch sharded by rows, and split its features in two."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    linear(torch.ones(size, 1), torch.ones(4, 1)).view(size, 2, 2)

    rows = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    outputs = linear(rows, distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]))
    shows = False
    try:
        outputs.view(size, 2, 2)
    except RuntimeError as error:
        text = str(error.__cause__ or error)  # the second, before torch 2.12
        shows = "Cannot unflatten unevenly sharded tensor" in text or "Attempted to split the sharded dimension" in text
        if rank == 0:
            print(outputs.placements, text)
    dist.barrier()
    dist.destroy_process_group()
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
