"""What the small trainings of the exam have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH = 4


def numbers(*shapes: tuple[int, ...], steps: int = 2) -> list[tuple[torch.Tensor, ...]]:
    """Random tensors of these shapes for each step."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(steps)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Without state, so that a wrong gradient stays as wrong as it is."""
    return torch.optim.SGD(parameters, lr=0.1)


def usual(**changes: Any) -> dict[str, Any]:
    """Arguments of `check_training` for a model that takes rows of four numbers."""
    return {
        "batches": numbers((4, WIDTH), (4, WIDTH)),
        "loss": functional.mse_loss,
        "optimizer": sgd,
    } | changes


def as_it_is(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """For ranks whose step does everything."""
    return model


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Replicas that average gradients."""
    return DistributedDataParallel(model)


def world() -> dist.ProcessGroup:
    """All ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def reducing(reduce: Callable[[nn.Module], None]) -> Callable[..., torch.Tensor]:
    """A step of ranks that reduces gradients by itself, before the update."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(inputs), targets)
        value.backward()
        reduce(model)
        optimizer.step()
        return value.detach()

    return step


def reduced(parameters: Any, group: dist.ProcessGroup, *, average: bool) -> None:
    """Add gradients up over a group, and divide them by its size."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        if average:
            parameter.grad /= group.size()
