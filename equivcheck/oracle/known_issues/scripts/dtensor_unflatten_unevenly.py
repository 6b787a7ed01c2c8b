"""A linear whose weight is sharded by rows returns an output sharded by features. DTensor does not redistribute for a view:
the first of the two new dims must be a multiple of the number of ranks.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear


def main() -> None:
    """Run a linear on a batch sharded by rows, and split its features in two."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    linear(torch.ones(size, 1), torch.ones(4, 1)).view(size, 2, 2)

    rows = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    outputs = linear(rows, distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]))
    outputs.view(size, 2, 2)
