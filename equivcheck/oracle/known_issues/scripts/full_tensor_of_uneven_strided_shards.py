"""`ColwiseParallel` and `fully_shard` both shard dim 0. The shards are right, but `full_tensor()` puts them together in
another order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> float:
    """Shard a weight with six rows over 2 x 2 ranks, and compare `full_tensor()` with the original weight."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(1, 6, bias=False)
    whole = torch.arange(6.0).reshape(6, 1)
    with torch.no_grad():
        model.weight.copy_(whole)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])

    found = model.weight.full_tensor()
    if dist.get_rank() == 0:
        print("whole:", whole.flatten().tolist(), "full_tensor():", found.flatten().tolist())
    return (found - whole).abs().max().item()
