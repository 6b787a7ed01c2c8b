"""The documentation asks for shared parameters in one unit, but nothing checks it. Each unit flattens its own copy of the
weight. `fully_shard` refuses the same model.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def tied() -> nn.Sequential:
    """Two linears with one weight."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight = nn.Parameter(torch.ones(2, 2))
    return model


def total(model: nn.Module) -> torch.Tensor:
    """Return the sum over all gradients on all ranks."""
    sums = [parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def main() -> float:
    """Compare the shared weight's gradient with the one in a plain model."""
    plain, inner = tied(), tied()
    sharded = FullyShardedDataParallel(
        inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True
    )
    for model in (plain, sharded):
        model(torch.ones(1, 2)).sum().backward()

    gradient = total(sharded)
    dist.all_reduce(gradient)
    difference = abs(float(gradient - total(plain)))
    if dist.get_rank() == 0:
        print("sum of the gradient:", float(total(plain)), "and, sharded,", float(gradient))
    return difference
