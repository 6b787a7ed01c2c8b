"""Gradient accumulation does that. https://github.com/pytorch/pytorch/pull/187732 fixes it."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Accumulate gradients over two microbatches in DDP with `static_graph=True`, the first under `no_sync`."""
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
