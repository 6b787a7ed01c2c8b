"""Without `use_orig_params`, FSDP1 tells by the size of an existing gradient whether it is unsharded (accumulated under
`no_sync`) or sharded (already reduced). With one element both sizes are one, so a reduced gradient is reduced again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> float:
    """Accumulate the gradient for one weight over two microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=False)

    for _ in range(2):
        model(torch.full((1, 1), float(rank + 1))).sum().backward()

    expected = 2 * sum(range(1, size + 1)) / size
    gradient = float(next(model.parameters()).grad)
    difference = abs(gradient - expected) if rank == 0 else 0.0
    if rank == 0:
        print("expected", expected, "but accumulated", gradient)
    return difference
