"""Dynamo makes strides of the local input symbolic if they differ from an earlier compilation. `DTensorSpec` keeps the symbols
and cannot hash them. ``dynamic=False`` avoids this.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Layer(nn.Module):
    """User-defined linear, which Dynamo traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 3) to the linear's output."""
        return self.linear(inputs)


def main() -> None:
    """Run a compiled tensor-parallel layer on two rows, stored by columns and then by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Layer(), mesh, {"linear": ColwiseParallel(output_layouts=Replicate())})
    model.compile(backend="aot_eager")
    for inputs in (torch.ones(3, 2).T, torch.ones(2, 3)):
        print("output", model(inputs).tolist())
