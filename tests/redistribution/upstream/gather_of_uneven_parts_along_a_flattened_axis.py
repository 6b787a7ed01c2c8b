"""Uneven parts of a dim that two axes cut are gathered along their flattened axis as if one had cut it (pytorch #194457).

torchrun --standalone --nproc-per-node 4 gather_of_uneven_parts_along_a_flattened_axis.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def max_difference() -> float:
    """Of five rows, which four ranks have as 2, 1, 1, 1, and one axis would cut as 2, 2, 1, 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    mesh._flatten()
    whole = torch.arange(5.0)
    part = whole.split((2, 1, 1, 1))[dist.get_rank()]
    uneven = DTensor.from_local(part, mesh, [Shard(0), Shard(0)], shape=whole.shape, stride=(1,))
    return (uneven.full_tensor() - whole).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
