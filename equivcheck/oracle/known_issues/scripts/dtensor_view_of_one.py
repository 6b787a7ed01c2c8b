"""The dim is sharded in name only. The only row or the only feature of a linear with a bias run into it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def main() -> None:
    """Flatten DTensors that are sharded by rows: first one with several rows, then one with a single row."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]).flatten()
    DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)]).flatten()
