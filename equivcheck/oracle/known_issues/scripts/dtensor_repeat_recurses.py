"""Dynamo makes the number of rows symbolic when it changes. ``dynamic=False`` avoids this. Before torch 2.13 a repeat alone
recurses, but not a repeat whose copies are averaged as here. https://github.com/pytorch/pytorch/issues/152963 is similar.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> None:
    """Compile a function that repeats and averages rows of a DTensor, and run it on four rows, then on eight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    repeated = torch.compile(lambda values: values.unsqueeze(1).repeat(1, 2, 1).mean(1), backend="aot_eager")
    for rows in (4, 8):
        values = distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)]).requires_grad_()
        repeated(values).sum().backward()
        print("gradient of", rows, "rows", values.grad.to_local().tolist())
