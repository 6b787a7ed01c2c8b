"""A compiled module under `FullyShardedDataParallel` cannot be compiled again, for another size of batch, while it has gradients.

With `use_orig_params`, a parameter has its whole size in forward and its gradient that of a shard, and Dynamo puts them together.

    torchrun --standalone --nproc-per-node 2 fsdp1_compiles_beside_gradients.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Layer(nn.Module):
    """A linear in a module of one's own: Dynamo does not look into those of torch below the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (rows, 2)."""
        return self.linear(inputs)


def main() -> int:
    """Accumulate the gradients of two microbatches, the second larger than the first."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = FullyShardedDataParallel(Layer(), device_id=torch.device("cpu"), use_orig_params=True)
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (2, 4):
        compiled(torch.ones(rows, 2)).sum().backward()
        print("gradients of a microbatch of", rows)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
