"""distribute_tensor into strided parts of different sizes fails an assertion without a word; on 2.9 the stride is lost.

torchrun --standalone --nproc-per-node 2 scatter_of_uneven_strided_parts.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def max_difference() -> float:
    """Of five rows, of which the first of two ranks has two of the first three and one of the others."""
    mesh = init_device_mesh("cpu", (2, 1))
    part = distribute_tensor(torch.arange(5.0), mesh, [_StridedShard(0, split_factor=2), Shard(0)]).to_local()
    expected = torch.tensor(([0.0, 1, 3], [2.0, 4])[dist.get_rank()])
    return (part - expected).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = max_difference()
    print(f"max difference {found}")
    dist.destroy_process_group()
    sys.exit(found > 0)
