"""A user's training made from importable functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivcheck.user.task import Task
from equivcheck.user.verdict import UserVerdict

STEPS = 3

USUAL = {"reduction": "mean", "data_axes": ("dp",), "loss_axes": (), "dtype": torch.float64, "keep_dtype": False, "seed": 0}


def build() -> nn.Module:
    """A small model with a norm."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


def batches(rows: int = 4, steps: int = STEPS) -> list[Any]:
    """Inputs and targets for each step."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)) for _ in range(steps)]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    return nn.functional.mse_loss(outputs, targets)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=0.01)


def sgd_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


def in_ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Apply DDP."""
    return DistributedDataParallel(model)


def brought(**changes: Any) -> dict[str, Any]:
    """Arguments for an equivalent training, with changes."""
    usual = {
        "model": build,
        "parallelize": in_ddp,
        "mesh": {"dp": 2},
        "batches": batches(),
        "loss": loss,
        "optimizer": adam,
    }
    return usual | changes


class Total(torch.autograd.Function):
    """Sum over a group's ranks. Backward passes the gradient on, as after a row-parallel layer."""

    @staticmethod
    def forward(_context: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum."""
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None


def said(verdict: UserVerdict) -> str:
    """Text of a verdict on one line, whatever its width."""
    return " ".join(verdict.describe().split())


def task_of(**changes: Any) -> Task:
    """Return the training as a task on two data ranks."""
    given = brought(mesh=(("dp", 2),), batches=tuple(batches())) | changes
    return Task(**(USUAL | given))
