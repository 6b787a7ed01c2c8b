"""The activations between the two are local tensors, which do not hold the full size. `RowwiseParallel` assumes the number of
ranks times the local size. ``use_local_output=False`` avoids this.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    """Run a column-parallel and a row-parallel linear with three features between them on two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    print("output", model(torch.ones(2, 2)).tolist())
