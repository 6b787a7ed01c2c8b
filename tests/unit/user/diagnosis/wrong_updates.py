"""Trainings with mistakes in updates, optimizer, buffers or shared weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unit.user.diagnosis.wrong_trainings import Wrong, averaged, by_hand, nothing, on_ranks, rank, sgd, step_of
from unit.user.programs import adam


class InfOnOneRank:
    """Skip a rank's update if its own gradients overflow, which happens once."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self) -> bool:
        """Count the rank's steps."""
        self.seen += rank() == 1
        return rank() != 1 or self.seen != 2


class Counter:
    """Act at one step on each rank."""

    def __init__(self, step: int, act: Callable[..., None]) -> None:
        self.step, self.act, self.seen = step, act, dict[int, int]()

    def __call__(self, *arguments: Any) -> None:
        """Count and act."""
        number = self.seen.get(rank(), 0)
        self.seen[rank()] = number + 1
        if number == self.step:
            self.act(*arguments)


def forgetting(optimizer: torch.optim.Optimizer, _parameters: Any) -> None:
    """Clear the optimizer state."""
    optimizer.state.clear()


def momentum_of_a_shard(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Zero the second rank's part of the state."""
    buffer = optimizer.state.get(parameters[0], {}).get("momentum_buffer")
    if buffer is not None:
        buffer[3:] = 0


def stepped_before(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Take a warm-up step with learning rate zero on ranks."""
    optimizer = adam(parameters)
    if dist.is_initialized():
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
    return optimizer


def two_groups(parameters: list[nn.Parameter], decays: tuple[float, float]) -> torch.optim.Optimizer:
    """Matrices and vectors with different weight decay."""
    groups = [[each for each in parameters if each.dim() == dim] for dim in (2, 1)]
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)], lr=0.01
    )


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate at each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Averaged(nn.Module):
    """A model with an exponential moving average of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(2, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)


def keep_average(model: nn.Module) -> None:
    """Update the moving average."""
    model.average.mul_(0.9).add_(model.linear.weight.detach(), alpha=0.1)


def average_after(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """Average after the update, on one device."""
    value = step_of(reduce=nothing)(model, batch, optimizer, loss)
    keep_average(model)
    return value


def average_before(model: nn.Module, batch: Any, optimizer: Any, loss: Any) -> Any:
    """Average before the update, on ranks."""
    return step_of(before_update=lambda *_: keep_average(model))(model, batch, optimizer, loss)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(torch.tanh(self.first(inputs))))


def untied(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Give the second layer a copy."""
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    return model


class WithSpare(nn.Module):
    """A model with a layer that it does not use."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2, bias=bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Two values per row."""
        return self.used(inputs)


def zeros_averaged(parameters: list[torch.Tensor]) -> None:
    """Average gradients, with zeros for missing ones."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    averaged(parameters)


def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, which changes parameters with zero gradients."""
    return torch.optim.AdamW(parameters, weight_decay=0.1)


UPDATES: dict[str, Wrong] = {
    "zeros_for_none": by_hand(
        "the gradients of `spare.weight` and `spare.bias` are None on one device, but zero on your ranks, "
        "so the optimizer does not skip these parameters",
        reduce=zeros_averaged,
        changes={"model": WithSpare, "optimizer": decaying},
    ),
    "zeros_for_one_none": by_hand(
        "the gradient of `spare.weight` is None on one device, but zero on your ranks, "
        "so the optimizer does not skip this parameter",
        reduce=zeros_averaged,
        changes={"model": partial(WithSpare, bias=False), "optimizer": decaying},
    ),
    "found_inf_unsynced": by_hand("does not update any parameter on rank 1, at step 1 only", updates=InfOnOneRank()),
    "state_lost": by_hand("the optimizer state is lost", before_update=forgetting),
    "momentum_zero_on_a_shard": by_hand(
        "rows 3 to 5 of `0.weight`", before_update=momentum_of_a_shard, changes={"optimizer": sgd}
    ),
    "stepped_twice": by_hand("the optimizer steps 2 times per step", after_update=lambda optimizer, _: optimizer.step()),
    "warm_up_counts": by_hand("step count begins at 1, not 0", changes={"optimizer": stepped_before}),
    "lr_times_world": by_hand(
        "lr is 0.02, not 0.01 (2 times, the number of dp ranks)",
        changes={"optimizer": on_ranks(lambda parameters: torch.optim.Adam(parameters, lr=0.02), adam)},
    ),
    "lost_decay_group": by_hand(
        "weight_decay is 0.1, not 0",
        changes={
            "optimizer": on_ranks(
                lambda parameters: two_groups(parameters, (0.1, 0.1)), lambda each: two_groups(each, (0.1, 0.0))
            )
        },
    ),
    "scheduler_forgotten": by_hand(
        "the schedule never advances",
        changes={"scheduler": on_ranks(lambda each: torch.optim.lr_scheduler.StepLR(each, 100), halving)},
    ),
    "untied": by_hand("no longer one parameter", changes={"model": Tied, "parallelize": untied}),
}
"""Mistakes in the optimizer or the model."""
