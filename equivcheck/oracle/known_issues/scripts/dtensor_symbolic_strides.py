"""Compiling a layer of DTensors for an input that lies otherwise in memory raises, as the hash of its strides is asked for.

Dynamo makes symbols of the strides of the local input that differ from those compiled for before, and `DTensorSpec` keeps them as
they are. ``dynamic=False`` goes around it.

    torchrun --standalone --nproc-per-node 1 dtensor_symbolic_strides.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Layer(nn.Module):
    """A linear in a module of one's own, which Dynamo looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (rows, 3)."""
        return self.linear(inputs)


def main() -> int:
    """Run a layer on two rows, by columns in memory and by rows."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Layer(), mesh, {"linear": ColwiseParallel(output_layouts=Replicate())})
    model.compile(backend="aot_eager")
    for inputs in (torch.ones(3, 2).T, torch.ones(2, 3)):
        print("output", model(inputs).tolist())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
