"""One process is enough: ``torch.nn.utils.clip_grad_value_([torch.nn.Parameter(torch.ones(1))], 1.0)``. FSDP1 ranks without
any part of a parameter and pipeline ranks with only frozen layers run into it.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    """Clip the gradient for a model with one weight, which only rank 0 holds."""
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(1, 1)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
