"""FSDP1 breaks the graph at each unit, so layers of one class share compiled code. For the second layer Dynamo makes sizes
symbolic, and the tracer, which looks for the source of a DTensor's size, returns to the same size.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Layer(nn.Module):
    """User-defined linear, which Dynamo traces."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, inputs) to (rows, outputs)."""
        return self.linear(inputs)


def main() -> None:
    """Compile two tensor-parallel layers with different widths, each in its own FSDP unit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Layer(8, 10), Layer(10, 8))
    for index, layer in enumerate(model):
        parallelize_module(layer, mesh["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
        model[index] = FullyShardedDataParallel(
            layer, device_id=torch.device("cpu"), device_mesh=mesh["dp"], use_orig_params=True
        )
    torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
