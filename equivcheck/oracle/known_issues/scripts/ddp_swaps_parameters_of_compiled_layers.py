"""Over tensor parallelism, DDP holds local tensors and makes DTensors of them before each forward. After an optimizer step,
backward of a compiled layer raises "A view was created in no_grad mode and its base or another view of its base has been
modified inplace ...". It works without `layer.compile` or without DDP.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train a compiled tensor-parallel layer in DDP for two steps."""
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
