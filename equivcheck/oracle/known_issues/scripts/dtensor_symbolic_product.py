"""Dynamo makes the width of heads symbolic if another FSDP unit of the class has another width. The size of a DTensor is then
the number of ranks times two quotients, and the tracer calls `operator.mul`, which takes two factors, with three.
https://github.com/pytorch/pytorch/pull/175398 fixes the same for sums.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Heads(nn.Module):
    """Module with two heads, whose width is computed from the shape of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.values, self.output = nn.Linear(2, 2 * width), nn.Linear(2 * width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, 2) to the heads' output."""
        values = self.values(inputs)
        heads = values.unflatten(-1, (values.shape[-1] // self.width, self.width)).transpose(-2, -3)
        outputs: torch.Tensor = self.output(heads.transpose(-2, -3).flatten(-2))
        return outputs


def main() -> None:
    """Compile two tensor-parallel layers whose heads have different widths, each in its own FSDP unit."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Heads(2), Heads(4))
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"values": ColwiseParallel(), "output": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    print("outputs of shape", torch.compile(model, backend="aot_eager")(torch.ones(2, 2, 2)).shape)
