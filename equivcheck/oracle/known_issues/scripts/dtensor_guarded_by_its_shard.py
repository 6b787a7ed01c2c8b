"""For a DTensor that needs no gradient, Dynamo guards only the shape of the local tensor. With 10 rows and with 9, the first of
two ranks holds 5, so the second layer gets 10 outputs as well.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Layer(nn.Module):
    """User-defined linear. All instances share compiled code."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, inputs) to (rows, outputs)."""
        return self.linear(inputs)


def main() -> None:
    """Run two compiled layers, and compare each output with targets in its shape."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(Layer(10, 10), Layer(10, 9))
    for layer in model:
        parallelize_module(layer, mesh, {"linear": ColwiseParallel(output_layouts=Replicate())})
        layer.compile(backend="aot_eager")
    outputs = model(torch.ones(2, 10))
    print(f"outputs of shape {tuple(outputs.shape)} on rank {dist.get_rank()}")
    print((outputs - torch.ones(2, 9)).sum().item())
