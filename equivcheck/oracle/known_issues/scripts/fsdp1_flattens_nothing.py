"""FSDP1 cannot build a flat parameter without elements."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Wrap a linear with one output, column-parallel over two ranks, so the second rank has no row."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    linear = parallelize_module(nn.Linear(2, 1), mesh["tp"], ColwiseParallel())
    FullyShardedDataParallel(linear, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
