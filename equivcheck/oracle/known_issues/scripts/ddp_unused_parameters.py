"""With an unused layer and ``find_unused_parameters=False``, DDP leaves gradients that differ between ranks, silently.

The unused parameter keeps its bucket from ever being complete, so the other gradients in it are not averaged. The error comes one
step later, when the wrong gradients have been used. Reported as https://github.com/pytorch/pytorch/issues/128949.

    torchrun --standalone --nproc-per-node 2 ddp_unused_parameters.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

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
        """Leave the second linear out."""
        return self.used(inputs)


def main() -> int:
    """Compare the gradient after one backward with the mean over ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model())

    model(torch.full((1, 1), float(rank + 1))).sum().backward()

    expected = sum(range(1, size + 1)) / size
    difference = abs(float(model.module.used.weight.grad) - expected)
    print(f"rank {rank}: gradient {float(model.module.used.weight.grad)}, mean over ranks {expected}")
    print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
