"""Bugs under DDP: a cache that lacks a number, and a model that is moved after it was wrapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from exam.item import Trained
from exam.trainings import WIDTH, in_ddp, numbers, usual


class Remembered:
    """Products that go by what is known of the operands' shapes, as a cache does whose key lacks the number."""

    def __init__(self) -> None:
        self.factors: dict[Any, float] = {}

    def __call__(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        """The factor of the first product of the kind."""
        return value * self.factors.setdefault((value.shape, value.dtype), factor)


def step_with(times: Any) -> Any:
    """A step whose loss has a weight of its own."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        inputs, targets, weight = batch
        optimizer.zero_grad()
        value = times(loss(model(inputs), targets), float(weight[0]))
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def remembered_factor() -> Trained:
    """The weight of the loss changes from step to step."""
    batches = [(*batch, torch.full((4,), float(step + 1))) for step, batch in enumerate(numbers((4, WIDTH), (4, WIDTH)))]
    plain = step_with(lambda value, factor: value * factor)
    brought = usual(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        mesh={"dp": 2},
        parallelize=in_ddp,
        batches=batches,
        step=plain,
    )
    return Trained(brought, {"rank_step": step_with(Remembered())})


def moved(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrapped, and then moved away and back: to another element type, as there is one device."""
    return in_ddp(model, mesh).float().double()


def moved_after_wrapping() -> Trained:
    """Initial weights are numbers that float32 has, so that the way there and back changes none."""
    brought = usual(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        mesh={"dp": 2},
        parallelize=in_ddp,
    )
    return Trained(brought, {"parallelize": moved})
