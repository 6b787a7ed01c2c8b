"""`ColwiseParallel` and `fully_shard` both shard dim 0. Ranks gather parts of different sizes, because some leave out the
padding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Gather a weight with seven rows from its shards on 2 x 3 ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(1, 7, bias=False)
    whole = torch.arange(7.0).reshape(7, 1)
    with torch.no_grad():
        model.weight.copy_(whole)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])

    found = model.weight.full_tensor()
    if dist.get_rank() == 0:
        print("whole:", whole.flatten().tolist(), "full_tensor():", found.flatten().tolist())
