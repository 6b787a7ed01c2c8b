"""`full_tensor()` on a mesh whose ranks descend along an axis puts parts together in reverse.

A mesh makes its groups with `new_group`, which sorts ranks, so that a rank's place in the group is not its coordinate. Nothing
raises. That groups are sorted is reported as https://github.com/pytorch/pytorch/issues/176126.

    torchrun --standalone --nproc-per-node 2 dtensor_on_descending_ranks.py

Exit code 1 when the difference shows. Seen on torch 2.9 to 2.15, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def main() -> int:
    """Gather a tensor of which the last rank has the first row."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(reversed(range(size))))
    whole = torch.arange(1.0, 1.0 + size)
    part = whole[mesh.get_coordinate()[0]].reshape(1)

    found = DTensor.from_local(part, mesh, [Shard(0)]).full_tensor()
    if dist.get_rank() == 0:
        print("whole:", whole.tolist(), "full_tensor():", found.tolist())
        print("max difference", (found - whole).abs().max().item())
    dist.barrier()
    dist.destroy_process_group()
    return int(not torch.equal(found, whole))


if __name__ == "__main__":
    sys.exit(main())
