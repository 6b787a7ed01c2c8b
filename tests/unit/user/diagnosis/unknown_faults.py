"""Wrong trainings outside the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unit.user.diagnosis.wrong_gradients import changed
from unit.user.diagnosis.wrong_parts import Twice, embedding_summed, staged
from unit.user.diagnosis.wrong_shards import by_own_norm, fsdp
from unit.user.diagnosis.wrong_trainings import Wrong, averaged, by_hand, nothing, rank, sgd, step_of
from unit.user.programs import batches, brought


def noisy(parameters: list[torch.Tensor]) -> None:
    """Each rank adds its own noise."""
    averaged(parameters)
    for parameter in parameters:
        parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank()))


class ZeroRow:
    """Zero another row in the first gradient at each step."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        """Count the call and zero a row."""
        averaged(parameters)
        number = self.steps[rank()] = self.steps.get(rank(), -1) + 1
        parameters[0].grad[number] = 0.0


def twice_wrong(parameters: list[torch.Tensor]) -> None:
    """Two mistakes at once."""
    averaged(parameters)
    for parameter in parameters:
        parameter.grad *= 2
    parameters[0].grad.zero_()


def larger_loss(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
    """Return a loss whose softmax counts each class twice."""
    return step_of()(model, batch, optimizer, loss) + math.log(2)


class Counting(nn.Module):
    """A layer that counts its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Count twice as many rows on ranks."""
        self.seen += torch.tensor([4.0, 8.0]) * (2 if dist.is_initialized() else 1)
        return self.linear(inputs)


def with_shared_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """A shared weight whose summed gradient is changed."""
    step = embedding_summed(scattered=False, change=change)
    return Wrong(says="", brought=brought(model=Twice, parallelize=staged, mesh={"dp": 2, "pp": 2}, step=step, optimizer=sgd))


UNKNOWN: dict[str, tuple[Wrong, str]] = {
    "noise": (by_hand("", reduce=noisy), "ranks disagree on `0.weight`"),
    "two_faults": (by_hand("", reduce=twice_wrong), ""),
    "permuted": (
        by_hand("", reduce=changed(lambda gradient: gradient.roll(1, 0))),
        "permuted: the right elements",
    ),
    "transposed": (by_hand("", reduce=changed(lambda gradient: gradient.T.reshape(gradient.shape))), "transposed"),
    "zero_rows": (by_hand("", reduce=ZeroRow()), "row 0 of `0.weight` is zero"),
    "whole_numbers_doubled": (
        Wrong(says="", brought=brought(model=Counting, batches=batches(steps=1))),
        "`seen` is 2 times as large as on one device",
    ),
    "classes_counted_twice": (
        Wrong(says="", brought=brought(parallelize=lambda model, _mesh: model, rank_step=larger_loss)),
        "the loss is log(2) larger than on one device, the logarithm of the number of dp ranks: a softmax may count each",
    ),
    "clipped_by_hand": (
        fsdp("", clips=by_own_norm, of_one=step_of(reduce=nothing, clips=by_own_norm)),
        "clipping by the rank's local norm gives",
    ),
    "shared_gradient_permuted": (with_shared_weight(lambda gradient: gradient.roll(1, 0)), "permuted: the right elements"),
    "slightly_off": (by_hand("", reduce=changed(lambda gradient: gradient * (1 + 1e-12))), ""),
}
"""Mistakes outside the catalogue, each with its pattern."""
