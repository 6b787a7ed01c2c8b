"""With ``find_unused_parameters=False`` the bucket of an unused parameter never completes, so other gradients in the bucket
are not averaged. DDP raises one step later, after the optimizer has used the wrong gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """One linear that runs and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.unused = nn.Linear(1, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run only the first linear."""
        return self.used(inputs)


def main() -> float:
    """Run one backward with an unused layer, and compare the gradient with the mean over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model())

    model(torch.full((1, 1), float(rank + 1))).sum().backward()

    expected = sum(range(1, size + 1)) / size
    difference = abs(float(model.module.used.weight.grad) - expected)
    print(f"rank {rank}: gradient {float(model.module.used.weight.grad)}, mean over ranks {expected}")
    return difference
