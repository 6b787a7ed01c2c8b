"""Autograd adds gradients of microbatches in place. The placement of a gradient depends on the sizes in its computation, so it
can be a shard for one microbatch and Partial for another. Steps whose gradients are zeroed in place run into it, too.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard


def main() -> None:
    """Add a sharded DTensor to a Partial one in place."""
    mesh = init_device_mesh("cpu", (2,))
    pending = DTensor.from_local(torch.ones(2, 2), mesh, (Partial(),))
    pending += DTensor.from_local(torch.ones(1, 2), mesh, (Shard(0),))
    print(pending.full_tensor())
