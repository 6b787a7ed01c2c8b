"""Rows are dim 1, and a rank's part is a strided view of all rows. Dynamo does not make a single row symbolic, but the stride
next to it, which `DTensorSpec` cannot hash. ``dynamic=False`` avoids this.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor


class Layer(nn.Module):
    """Linear for rows along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (2, rows) to (2, rows)."""
        return self.linear(inputs.T).T


def shard(_name: str, module: nn.Module, mesh: dist.DeviceMesh) -> None:
    """Shard each parameter along dim 0."""
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def main() -> None:
    """Run a compiled layer on DTensors with two rows per rank, then with one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = distribute_module(Layer(), mesh, shard)
    model.compile(backend="aot_eager")
    for rows in (4, 2):
        local = torch.ones(2, rows).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        print("output", model(DTensor.from_local(local, mesh, [Shard(1)])).to_local().tolist())
