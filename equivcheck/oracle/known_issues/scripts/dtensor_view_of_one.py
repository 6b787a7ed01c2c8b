"""On a mesh of one rank a dim of size one that is sharded, if in name only, cannot be flattened away.

    torchrun --standalone --nproc-per-node 1 dtensor_view_of_one.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def main() -> int:
    """Flatten one row on one rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]).flatten()

    shows = False
    try:
        DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)]).flatten()
    except RuntimeError as error:
        shows = "would remove or reshape sharded dimension 0" in str(error)
        print(error)
    dist.destroy_process_group()
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
