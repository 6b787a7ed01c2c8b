"""Compiled layers under tensor parallelism and `DistributedDataParallel` raise in the backward of the second step.

Over tensor parallelism `DistributedDataParallel` holds local tensors, and makes DTensors of them anew for each forward. Once the
optimizer has changed them, the backward of the compiled layers raises "A view was created in no_grad mode and its base or another
view of its base has been modified inplace with grad mode enabled". Without `layer.compile`, or without the wrapper, it does not.

    torchrun --standalone --nproc-per-node 2 ddp_swaps_parameters_of_compiled_layers.py

Exit code 1 when it raises. Seen on torch 2.14 and 2.15, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Train for two steps."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    module = DistributedDataParallel(model, device_mesh=mesh["dp"])
    for layer in model:
        layer.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = module(torch.ones(2, 2)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item()}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
