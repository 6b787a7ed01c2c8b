"""All parameters of the unit are frozen, two of its modules share a weight, and nothing is sharded (`NO_SHARD`, or one rank).
The next forward fails on every rank. It works if the weight is trained or not shared, or with ``use_orig_params=False``.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Middle(nn.Module):
    """Trainable linear in its own FSDP unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the linear."""
        return self.linear(inputs)


def tied() -> nn.Sequential:
    """A frozen embedding, a trainable linear, and a head tied to the embedding."""
    model = nn.Sequential(nn.Embedding(3, 2), Middle(), nn.Linear(2, 3, bias=False))
    model[2].weight = model[0].weight.requires_grad_(False)
    return model


def main() -> None:
    """Run forward and backward twice."""
    model = FullyShardedDataParallel(
        tied(), auto_wrap_policy=ModuleWrapPolicy({Middle}), device_id=torch.device("cpu"), use_orig_params=True
    )
    for _step in range(2):
        model(torch.tensor([[0, 1]])).sum().backward()
