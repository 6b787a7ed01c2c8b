"""Along a flattened axis whose ranks do not ascend, parts are gathered in ascending order of ranks (pytorch #176126).

torchrun --standalone --nproc-per-node 4 gather_along_flattened_columns.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def max_difference() -> float:
    """Of four rows on a mesh of which the next rank is the next along the first axis."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("rows", "columns"))
    mesh._flatten()
    whole = torch.arange(4.0)
    first, second = mesh.get_coordinate()
    part = whole[2 * first + second].reshape(1)
    return (DTensor.from_local(part, mesh, [Shard(0), Shard(0)]).full_tensor() - whole).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
