"""It reduces the norm over data-parallel ranks only, so each tensor-parallel rank clips by the norm of its own shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> float:
    """Compute the gradient norm for a column-parallel linear with one row on each rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    linear = parallelize_module(nn.Linear(2, 2, bias=False), mesh["tp"], ColwiseParallel())
    model = FullyShardedDataParallel(linear, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    (model(torch.ones(1, 2)) * (1.0 + dist.get_rank())).sum().backward()
    norm = float(model.clip_grad_norm_(1.0))

    expected = 10.0**0.5
    print("norm", norm, "expected", expected)
    return abs(norm - expected)
