"""The backward of a flatten fails on a gradient whose local strides are not those that DTensor says it has.

A gradient that an elementwise product leaves is laid out in one way globally and in another locally, as one of its factors is a
scalar expanded: autograd takes a view where the local tensor needs a copy.

    torchrun --standalone --nproc-per-node 2 dtensor_flatten_backward_strides.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def squared(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of the values, flattened, viewed as they were, and transposed."""
    return (values.flatten().view(values.shape).T - target).square().sum()


def main() -> int:
    """Differentiate the same with plain and with sharded tensors."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    squared(torch.ones(2 * size, 3, requires_grad=True), torch.zeros(3, 2 * size)).backward()

    values = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    target = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(1)])
    shows = False
    try:
        squared(values, target).backward()
    except RuntimeError as error:
        shows = "view size is not compatible" in str(error)
        if rank == 0:
            print(error)
    dist.barrier()
    dist.destroy_process_group()
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
