"""A small training under correct and wrong layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Matrix

NUM_PARAMETERS = 3 * 2 + 2


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Apply DDP."""
    return DistributedDataParallel(model)


def summed(model: nn.Module, _mesh: DeviceMesh) -> None:
    """Sum gradients without division, so they are twice too large on 2 ranks."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))


def raises(model: nn.Module, _mesh: DeviceMesh) -> None:
    """Raise instead of building a model."""
    raise RuntimeError("no <model>")


def batches(steps: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches once."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def shared(**changes: Any) -> dict[str, Any]:
    """Shared arguments, with changes."""
    usual = {
        "model": lambda: nn.Linear(3, 2),
        "batches": batches(),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    return usual | changes


def matrix_of(layouts: dict[str, Any], **changes: Any) -> Matrix:
    """A matrix with these layouts; the default mesh has two ranks."""
    found = {name: {"mesh": {"dp": 2}} | options for name, options in layouts.items()}
    return Matrix(layouts=found, **shared(**changes))
