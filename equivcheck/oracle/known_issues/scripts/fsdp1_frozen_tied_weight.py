"""`FullyShardedDataParallel` with `use_orig_params` loses a frozen weight of two modules of one unit, where nothing is sharded.

A unit of which nothing requires a gradient, with a weight that two of its modules have, as an embedding and a head that are tied:
with `NO_SHARD`, or one rank to shard over, the next forward pass fails on every rank. With the weight trained, a weight for each
module, or `use_orig_params=False` it does not.

    torchrun --standalone --nproc-per-node 1 fsdp1_frozen_tied_weight.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Middle(nn.Module):
    """What is trained, a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As the linear."""
        return self.linear(inputs)


def tied() -> nn.Sequential:
    """A frozen embedding, a trained linear, and a head that has the embedding's weight."""
    model = nn.Sequential(nn.Embedding(3, 2), Middle(), nn.Linear(2, 3, bias=False))
    model[2].weight = model[0].weight.requires_grad_(False)
    return model


def main() -> int:
    """Two steps."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = FullyShardedDataParallel(
        tied(), auto_wrap_policy=ModuleWrapPolicy({Middle}), device_id=torch.device("cpu"), use_orig_params=True
    )
    try:
        for _step in range(2):
            model(torch.tensor([[0, 1]])).sum().backward()
        found = 0
    except AssertionError as error:
        print("AssertionError:", error)
        found = 1
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.exit(main())
