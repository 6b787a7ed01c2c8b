"""Dynamo makes a size symbolic if it differs from an earlier compilation. For one symbolic size of a DTensor it finds no
source.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Model(nn.Module):
    """Linear with a bias on the sum of token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(2, 2), nn.Embedding(3, 2)
        self.linear = nn.Linear(2, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map tokens (rows, 3) to outputs."""
        outputs: torch.Tensor = self.linear(self.tokens(inputs) + self.positions(torch.arange(3)))
        return outputs


def main() -> None:
    """Compute the outputs for two rows."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    whole = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("tokens", "positions", "linear")}
    model = parallelize_module(Model(), mesh["tp"], whole)
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    print("outputs of shape", torch.compile(unit, backend="aot_eager")(torch.tensor([[0, 0, 0], [0, 1, 1]])).shape)
