"""`distribute_tensor` into strided shards of different sizes fails an assertion without a word.

Shards are scattered, which takes parts of one size, and strided ones are not padded. On torch 2.9 the stride is lost instead, and
ranks get other rows.

    torchrun --standalone --nproc-per-node 2 distribute_tensor_in_uneven_strided_shards.py

Exit code 1 when the assertion fails. Seen on torch 2.10 to 2.15, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def main() -> int:
    """Distribute five rows as a tensor that is cut by the second axis first."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    try:
        distribute_tensor(torch.arange(5.0), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    except AssertionError as error:
        print(f"AssertionError: {error}")
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
