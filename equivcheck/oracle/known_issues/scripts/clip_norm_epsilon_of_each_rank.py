"""It divides by the norm plus 1e-6. The norm is still partial at that point, and each rank adds 1e-6 to its part. Norms that
are a maximum are right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> float:
    """Clip one gradient as a sharded DTensor and as a plain tensor, and return the relative difference."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gradient = 1e-6 * torch.arange(1.0, 5.0, dtype=torch.float64)
    plain, sharded = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(distribute_tensor(gradient, mesh, [Shard(0)]))
    plain.grad, sharded.grad = gradient.clone(), distribute_tensor(gradient, mesh, [Shard(0)])
    for parameter in (plain, sharded):
        nn.utils.clip_grad_norm_([parameter], 1e-6)
    return float((sharded.grad.full_tensor() / plain.grad - 1).abs().max())
