"""`reshard_after_forward=N` keeps the parameter as one dim of elements; the copy out of the all-gather asks for the size of
dim 1, which `shard_placement_fn` (https://github.com/pytorch/pytorch/pull/137496) names. If the first dim is uneven,
resharding itself fails ('setStorage: sizes ... are out of bounds').
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def main() -> None:
    """Shard a linear along dim 1 with `reshard_after_forward=2`, and run forward and backward."""
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1), reshard_after_forward=2)
    loss = model(torch.ones(1, 4)).sum()
    print("forward", loss)
    loss.backward()
    print("backward")
