"""Scaling in place redistributes a Partial DTensor first, scales the copy and drops it. On torch 2.9 the norm is wrong, too,
because it is taken before the sum over ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def main() -> float:
    """Clip a Partial gradient with `clip_grad_norm_`, and compare it with the explicitly scaled full gradient."""
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
