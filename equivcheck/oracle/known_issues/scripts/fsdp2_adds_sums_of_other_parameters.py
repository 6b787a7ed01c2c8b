"""A unit accumulates sums over shards in one flat tensor, whatever parameters they belong to. A microbatch that uses other
parameters adds their sums to those before.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Alternate(nn.Module):
    """Two linears, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])

    def forward(self, number: int) -> torch.Tensor:
        """Return the summed outputs of linear `number`."""
        return self.linears[number](torch.full((1, 1), number + 1.0)).sum()


def main() -> float:
    """Run backward through each linear, and compare the second linear's gradient with the expected value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = Alternate()
    fully_shard(model, mesh=mesh)
    for number in (0, 1):
        model.set_requires_all_reduce(number == 1)
        model(number).backward()
    gradient = float(model.linears[1].weight.grad.full_tensor())
    print(f"gradient {gradient}, expected 2.0")
    return abs(gradient - 2.0)
