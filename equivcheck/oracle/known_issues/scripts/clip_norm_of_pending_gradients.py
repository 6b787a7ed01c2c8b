"""`clip_grad_norm_` of gradients that are pending a sum over ranks leaves them as they are.

They are scaled in place, which changes no DTensor that is Partial: it is redistributed first, and what is scaled is thrown away.
On torch 2.9 the norm is wrong besides, https://github.com/pytorch/pytorch/issues/165962: it is taken before the sum is reduced.

    torchrun --standalone --nproc-per-node 2 clip_norm_of_pending_gradients.py

Exit code 1 when a gradient is not what it should be. Seen on torch 2.9 to 2.11, CPU, gloo; right on 2.12.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def prog() -> float:
    """The difference between the clipped gradient and what it should be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 2, dtype=torch.float64), mesh, [Replicate()]))
    rows = distribute_tensor(inputs, mesh, [Shard(0)])
    (rows @ weight.T).sin().sum().backward()
    assert isinstance(weight.grad, DTensor)
    whole = weight.grad.full_tensor()
    expected = whole / (whole.norm() + 1e-6)
    nn.utils.clip_grad_norm_([weight], 1.0)
    return float((weight.grad.full_tensor() - expected).abs().max())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    difference = prog()
    if dist.get_rank() == 0:
        print(f"max difference {difference:.3g}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(difference > 1e-9)
