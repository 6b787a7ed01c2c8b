"""Without `use_orig_params`, Dynamo skips FSDP1's modules and everything that `checkpoint` runs, but compiles the hooks of
`parallelize_module`. The hook of the next linear takes the tensor out of the `AsyncCollectiveTensor` and drops its graph.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Three linears with activation checkpointing for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to (rows, 2)."""
        outputs: torch.Tensor = self.third(checkpoint(self.second, self.first(inputs), use_reentrant=False))
        return outputs


def gradients(mesh: DeviceMesh, compiles: bool) -> torch.Tensor:
    """Gradients for all parameters on this rank."""
    torch.manual_seed(0)
    by_rows = {name: RowwiseParallel(input_layouts=Replicate()) for name in ("second", "third")}
    model = parallelize_module(Model(), mesh["tp"], by_rows)
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    called = torch.compile(unit, backend="aot_eager") if compiles else unit
    called(torch.ones(2, 2)).sum().backward()
    (flat,) = unit.parameters()
    return flat.grad


def main() -> float:
    """Compute gradients with and without `torch.compile`."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    expected, found = gradients(mesh, compiles=False), gradients(mesh, compiles=True)
    print("gradients", found.tolist())
    difference = float((found - expected).abs().max())
    return difference
