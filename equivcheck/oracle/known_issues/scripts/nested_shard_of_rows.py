"""Sharding 5 rows twice over a 2x2 mesh gives 2, 1, 1, 1. If the mesh has been flattened, redistributing to `Replicate` uses
one all-gather over the flattened mesh, which expects 2, 2, 1, 0: padding takes the place of the last row.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main() -> float:
    """Shard five rows twice over a flattened 2 x 2 mesh, gather them, and return the difference."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    mesh["outer", "inner"]._flatten("all")

    rows = torch.arange(1.0, 6.0)
    sharded = distribute_tensor(rows, mesh, [Shard(0), Shard(0)])
    gathered = sharded.redistribute(placements=[Replicate(), Replicate()]).to_local()

    difference = float((gathered - rows).abs().max())
    if dist.get_rank() == 0:
        print("distributed:", rows.tolist())
        print("gathered:   ", gathered.tolist())
    return difference
