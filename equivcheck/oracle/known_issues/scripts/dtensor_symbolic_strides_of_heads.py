"""Dynamo makes the width of heads symbolic if another FSDP unit of the class has another width. The gradient of the transposed
keys has it among its strides, which `DTensorSpec` cannot hash.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Scores(nn.Module):
    """Attention scores for two heads. Their width is computed from the input's shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.query, self.key = nn.Linear(2, 2 * width), nn.Linear(2, 2 * width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2, 2) to (rows, 2, 2), for two heads and two positions."""
        query, key = self.heads(self.query(inputs)), self.heads(self.key(inputs))
        return (query @ key.transpose(-1, -2)).sum(-1)

    def heads(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape (rows, length, heads * width) to (rows, heads, length, width)."""
        parts: torch.Tensor = values.unflatten(-1, (values.shape[-1] // self.width, self.width))  # type: ignore[no-untyped-call]
        return parts.transpose(-2, -3)


def main() -> None:
    """Compile two tensor-parallel layers whose heads have different widths, each in its own FSDP unit."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Scores(2), Scores(4))
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"query": ColwiseParallel(), "key": ColwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    print("outputs of shape", torch.compile(model, backend="aot_eager")(torch.ones(2, 2, 2)).shape)
