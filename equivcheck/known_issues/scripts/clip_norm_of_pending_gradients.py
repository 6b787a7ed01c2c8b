"""`clip_grad_norm_` of gradients that are pending a sum over ranks takes the norm of what each rank has of the sum.

https://github.com/pytorch/pytorch/issues/165962: the norm of a DTensor that is Partial is taken before it is reduced.

    torchrun --standalone --nproc-per-node 2 clip_norm_of_pending_gradients.py

Exit code 1 when the norm is wrong. Seen on torch 2.9.1, CPU, gloo; right on 2.10.0.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def prog() -> float:
    """The difference between the norm and that of the whole gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 2, dtype=torch.float64), mesh, [Replicate()]))
    rows = distribute_tensor(inputs, mesh, [Shard(0)])
    (rows @ weight.T).sin().sum().backward()
    assert isinstance(weight.grad, DTensor)
    expected = weight.grad.full_tensor().norm()
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return float((norm - expected).abs())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    difference = prog()
    if dist.get_rank() == 0:
        print(f"max difference {difference:.3g}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(difference > 1e-9)
