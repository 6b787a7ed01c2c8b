"""The compiled backward of `repeat` over a DTensor recurses without end once a size is symbolic.

Dynamo makes a symbol of the number of rows when it is another than before. ``dynamic=False`` goes around it. Before 2.13 a repeat
alone shows it, and one whose copies are averaged, as here, does not.

    torchrun --standalone --nproc-per-node 1 dtensor_repeat_recurses.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> int:
    """Average two copies of four rows, then of eight."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    repeated = torch.compile(lambda values: values.unsqueeze(1).repeat(1, 2, 1).mean(1), backend="aot_eager")
    for rows in (4, 8):
        values = distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)]).requires_grad_()
        repeated(values).sum().backward()
        print("gradient of", rows, "rows", values.grad.to_local().tolist())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
