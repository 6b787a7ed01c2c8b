"""A linear with a weight sharded by rows leaves its output cut by features; those cannot be flattened before torch 2.12.

DTensor redistributes nothing for a view: of dims that are flattened to one, only the first may be cut. Later versions keep the
result as a strided shard.

    torchrun --standalone --nproc-per-node 2 dtensor_flatten_cut_features.py

Exit code 1 when the error shows. Seen on torch 2.9 to 2.11, CPU, gloo; right on 2.12.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear


def main() -> int:
    """Run a linear on a batch sharded by rows, and flatten what it leaves."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    rows = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    outputs = linear(rows, distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]))
    shows = False
    try:
        outputs.flatten()
    except RuntimeError as error:
        cause = error.__cause__ or error
        shows = "Attempted to flatten multiple dimensions, with dimension 1 being sharded" in str(cause)
        if rank == 0:
            print(outputs.placements, cause)
    dist.barrier()
    dist.destroy_process_group()
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
