"""Compiling a layer of DTensors for a second shape recurses without end below `FullyShardedDataParallel`.

The wrapper breaks the graph at each unit, so that layers of one class share what is compiled. At the second one Dynamo makes
sizes symbolic, and the tracer, looking for where a size of a DTensor comes from, comes back to it.

    torchrun --standalone --nproc-per-node 4 dtensor_symbolic_shapes_recurse.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Layer(nn.Module):
    """A linear in a module of one's own, which Dynamo looks into."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (rows, inputs)."""
        return self.linear(inputs)


def main() -> int:
    """Run two layers of other widths, each a unit."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Layer(8, 10), Layer(10, 8))
    for index, layer in enumerate(model):
        parallelize_module(layer, mesh["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
        model[index] = FullyShardedDataParallel(
            layer, device_id=torch.device("cpu"), device_mesh=mesh["dp"], use_orig_params=True
        )
    torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
