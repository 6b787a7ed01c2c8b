"""The gradient of what becomes of `Partial("avg")`, or `"max"`, or `"min"`, is that of a sum.

The backward of `redistribute` hands the gradient of the result to each rank whole: for a mean over n ranks n times what it is,
and for a maximum also to ranks that do not have it. Nothing raises.

    torchrun --standalone --nproc-per-node 2 dtensor_average_has_the_gradient_of_a_sum.py

Exit code 1 when the difference shows. Seen on torch 2.9 to 2.15, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def main() -> int:
    """Differentiate the mean of what ranks have, which gives each rank an n-th."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    addend = torch.full((1,), 1.0 + dist.get_rank(), requires_grad=True)

    mean = DTensor.from_local(addend, mesh, [Partial("avg")]).redistribute(placements=[Replicate()]).to_local()
    mean.sum().backward()
    if dist.get_rank() == 0:
        print("mean:", mean.item(), "its gradient:", addend.grad.item(), "instead of", 1 / size)
        print("max difference", abs(addend.grad.item() - 1 / size))
    wrong = addend.grad.item() != 1 / size
    dist.barrier()
    dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
