"""Compiling a linear of a DTensor raises where a rank had several rows, and then has one: the hash of a stride is asked for.

Rows are the second dim, and a rank has its part of the whole as it lies in memory. Of a single row Dynamo makes no symbol, but of
the stride beside it, and `DTensorSpec` keeps that as it is. ``dynamic=False`` goes around it.

    torchrun --standalone --nproc-per-node 2 dtensor_symbolic_strides_of_one_row.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor


class Layer(nn.Module):
    """A linear of rows that lie along the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (2, rows), and so is what it returns."""
        return self.linear(inputs.T).T


def shard(_name: str, module: nn.Module, mesh: dist.DeviceMesh) -> None:
    """Cut each parameter along its first dim."""
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def main() -> int:
    """Run a layer on two rows for each rank, and then on one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = distribute_module(Layer(), mesh, shard)
    model.compile(backend="aot_eager")
    for rows in (4, 2):
        local = torch.ones(2, rows).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        print("output", model(DTensor.from_local(local, mesh, [Shard(1)])).to_local().tolist())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
