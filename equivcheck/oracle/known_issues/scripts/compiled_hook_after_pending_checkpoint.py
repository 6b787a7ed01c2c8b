"""Gradients of what comes before a checkpointed `RowwiseParallel` linear are zero in a compiled FSDP1 without `use_orig_params`.

Dynamo looks into none of its modules, and leaves out all that `checkpoint` runs: the sum that the linear returns is still to be
waited for. What it compiles are the hooks of `parallelize_module`. That of the next linear takes the tensor out of the
`AsyncCollectiveTensor`, without its graph.

    torchrun --standalone --nproc-per-node 2 compiled_hook_after_pending_checkpoint.py

Exit code 1 when it shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Three linears, the second of which runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From (rows, 2) to the same."""
        outputs: torch.Tensor = self.third(checkpoint(self.second, self.first(inputs), use_reentrant=False))
        return outputs


def gradients(mesh: DeviceMesh, compiles: bool) -> torch.Tensor:
    """Those of all parameters of this rank."""
    torch.manual_seed(0)
    by_rows = {name: RowwiseParallel(input_layouts=Replicate()) for name in ("second", "third")}
    model = parallelize_module(Model(), mesh["tp"], by_rows)
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    called = torch.compile(unit, backend="aot_eager") if compiles else unit
    called(torch.ones(2, 2)).sum().backward()
    (flat,) = unit.parameters()
    return flat.grad


def main() -> int:
    """Compute gradients with and without a compiler."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    expected, found = gradients(mesh, compiles=False), gradients(mesh, compiles=True)
    print("gradients", found.tolist())
    difference = float((found - expected).abs().max())
    print("max difference", difference)
    dist.destroy_process_group()
    return int(difference > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
