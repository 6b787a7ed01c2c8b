"""A linear whose weight is sharded by rows returns an output sharded by features. DTensor does not redistribute for a view, so
before torch 2.12 only the first of the flattened dims can be sharded. Later versions return a strided shard.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear


def main() -> None:
    """Run a linear on a batch sharded by rows, and flatten its output."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    rows = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    outputs = linear(rows, distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]))
    outputs.flatten()
