"""A mesh whose ranks descend gathers parts in reverse: its groups have ranks in ascending order (pytorch #176126).

torchrun --standalone --nproc-per-node 2 gather_on_descending_ranks.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def max_difference() -> float:
    """Of a tensor of which the last rank has the first row."""
    size = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(reversed(range(size))))
    whole = torch.arange(float(size))
    part = whole[mesh.get_coordinate()[0]].reshape(1)
    return (DTensor.from_local(part, mesh, [Shard(0)]).full_tensor() - whole).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
