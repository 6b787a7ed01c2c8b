"""`FullyShardedDataParallel` unties a weight that modules in different units share, silently.

The documentation asks for shared parameters to be in one unit; nothing checks it. Each unit flattens the weight for itself, and
one of the modules goes on with a copy that is not the other's any more. `fully_shard` refuses the same.

    torchrun --standalone --nproc-per-node 2 fsdp1_unties.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

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
    """The sum of all elements of all gradients, over all ranks."""
    sums = [parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def main() -> int:
    """Compare the gradient of the shared weight with that of a plain model."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
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
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
