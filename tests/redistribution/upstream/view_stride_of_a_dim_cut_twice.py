"""A dim that two axes cut does not become one with a stride as views make it, which stands for no order of cuts.

torchrun --standalone --nproc-per-node 4 view_stride_of_a_dim_cut_twice.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def max_difference() -> float:
    """Of eight rows, which ranks have as quarters, and are to have as a view of two rows of four that is cut along columns."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(8.0)
    quarters = DTensor.from_local(whole[2 * dist.get_rank() :][:2], mesh, [Shard(0), Shard(0)])
    found = quarters.redistribute(placements=[Replicate(), _StridedShard(0, split_factor=2)]).to_local()
    expected = whole.view(2, 2, 2)[:, mesh.get_coordinate()[1]].flatten()
    return (found - expected).abs().max().item() if found.shape == expected.shape else float("inf")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
