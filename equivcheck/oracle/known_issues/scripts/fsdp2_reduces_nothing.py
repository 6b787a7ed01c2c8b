"""The rank cannot reduce the empty gradient."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run backward for a linear with one output, column-parallel over two ranks, so the second rank has no row."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    linear = parallelize_module(nn.Linear(2, 1), mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    linear(torch.ones(2, 2)).sum().backward()
