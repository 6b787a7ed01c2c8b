"""A product of DTensors of four dims flattens the first two, which is refused before torch 2.12 where the second is sharded.

So attention by products cannot run on heads that propagation has cut.

    torchrun --standalone --nproc-per-node 1 dtensor_product_of_cut_heads.py

Exit code 1 when the error shows. Seen on torch 2.9 to 2.11, CPU, gloo; right on 2.12.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def main() -> int:
    """Multiply queries by keys, both (rows, heads, length, width) and sharded by heads."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query, key = (DTensor.from_local(torch.ones(2, 2, 3, 4), mesh, [Shard(1)]) for _ in range(2))
    shows = False
    try:
        query @ key.transpose(-1, -2)
    except RuntimeError as error:
        cause = error.__cause__ or error
        shows = "Attempted to flatten multiple dimensions, with dimension 1 being sharded" in str(cause)
        if dist.get_rank() == 0:
            print(query.placements, cause)
    dist.barrier()
    dist.destroy_process_group()
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
