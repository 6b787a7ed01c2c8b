"""A unit accumulates sums over shards in one flat tensor. A microbatch that uses parameters of another size cannot add to it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Alternate(nn.Module):
    """Two linears, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(1, 2, bias=False), nn.Linear(1, 3, bias=False)])

    def forward(self, number: int) -> torch.Tensor:
        """Return the summed outputs of linear `number`."""
        return self.linears[number](torch.full((1, 1), number + 1.0)).sum()


def main() -> None:
    """Run backward through the first linear, then through the second, as two microbatches."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = Alternate()
    fully_shard(model, mesh=mesh)
    for number in (0, 1):
        model.set_requires_all_reduce(number == 1)
        model(number).backward()
        print("backward", number)
