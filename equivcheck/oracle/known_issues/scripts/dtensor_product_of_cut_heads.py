"""A product of four dims flattens the first two, which DTensor refuses before torch 2.12 if the second is sharded. Attention
by matmul therefore cannot run on sharded heads.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def main() -> None:
    """Multiply queries by keys, both sharded by heads. Their shape is (rows, heads, length, width)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query, key = (DTensor.from_local(torch.ones(2, 2, 3, 4), mesh, [Shard(1)]) for _ in range(2))
    print("scores of shape", (query @ key.transpose(-1, -2)).shape)
