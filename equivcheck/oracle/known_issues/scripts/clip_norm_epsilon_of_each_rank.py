"""`clip_grad_norm_` of sharded gradients adds its epsilon to the norm once for each rank.

It divides by the norm plus 1e-6. The norm of a DTensor that is sharded is yet to be summed over ranks then, and each rank adds
1e-6 to its part. Norms that are a maximum are right.

    torchrun --standalone --nproc-per-node 2 clip_norm_epsilon_of_each_rank.py

Exit code 1 when the clipped gradient is not that of one device. Seen on torch 2.9.1, CPU, gloo; right on 2.10.0.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def prog() -> float:
    """The largest difference between the clipped gradient and that of a plain tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gradient = torch.arange(1.0, 5.0, dtype=torch.float64)
    plain, sharded = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(distribute_tensor(gradient, mesh, [Shard(0)]))
    plain.grad, sharded.grad = gradient.clone(), distribute_tensor(gradient, mesh, [Shard(0)])
    for parameter in (plain, sharded):
        nn.utils.clip_grad_norm_([parameter], 0.01)
    return float((sharded.grad.full_tensor() - plain.grad).abs().max())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    difference = prog()
    if dist.get_rank() == 0:
        print(f"max difference {difference:.3g}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(difference > 1e-12)
