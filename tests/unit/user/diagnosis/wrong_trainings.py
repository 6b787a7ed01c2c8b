"""Small trainings with common mistakes, and the expected causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.user.batches import microbatches
from unit.user.programs import batches, brought

MAX_NORM = 0.05


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One wrong training."""

    says: str
    """Text in the expected cause; empty if none may be named."""
    brought: dict[str, Any]
    """Arguments for `check_training`."""
    step: int | None = field(default=None)
    """Step that must differ first; None for any."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def two_microbatches(steps: int = 3) -> list[Any]:
    """Steps with two microbatches, four rows each."""
    return [
        [tuple(half) for half in zip(inputs.chunk(2), targets.chunk(2), strict=True)] for inputs, targets in batches(8, steps)
    ]


def rank() -> int:
    """The caller's rank."""
    return dist.get_rank()


def averaged(parameters: list[torch.Tensor], group: Any = None) -> None:
    """Average gradients over a group."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def nothing(*_: Any) -> None:
    """Do nothing."""


def clip(parameters: list[torch.Tensor]) -> None:
    """Clip correctly."""
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def step_of(  # noqa: PLR0913 - one for each part, all by keyword
    *,
    reduce: Callable[..., None] = averaged,
    after_each: Callable[..., None] = nothing,
    clips: Callable[..., None] = nothing,
    zero: bool = True,
    before_update: Callable[..., None] = nothing,
    after_update: Callable[..., None] = nothing,
    takes: Callable[[int], bool] = lambda _number: True,
    updates: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """A rank's step, built from one function per part."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> float:
        parameters = list(model.parameters())
        if zero:
            optimizer.zero_grad()
        total, parts = 0.0, microbatches(batch)
        for number, (inputs, targets) in enumerate(parts):
            value = loss(model(inputs), targets) / len(parts)
            if takes(number):
                value.backward()
            total += float(value.detach())
            after_each(parameters, number)
        reduce(parameters)
        clips(parameters)
        before_update(optimizer, parameters)
        if updates():
            optimizer.step()
        after_update(optimizer, parameters)
        return total

    return step


def by_hand(says: str, *, first: int | None = None, of_one: Any = None, changes: Any = None, **parts: Any) -> Wrong:
    """Explicit data parallelism with a mistake in one part; `of_one` replaces the single-device step."""
    given = {"parallelize": lambda model, _mesh: model, "rank_step": step_of(**parts), "step": of_one}
    return Wrong(says=says, brought=brought(**given | (changes or {})), step=first)


clipping_step = step_of(reduce=nothing, clips=clip)
"""A single-device step with clipping."""


def on_rank(which: int, act: Callable[..., None]) -> Callable[..., None]:
    """Apply a function on one rank only."""
    return lambda *arguments: act(*arguments) if rank() == which else None


def off_rank(which: int, act: Callable[..., None]) -> Callable[..., None]:
    """Apply a function on all ranks except one."""
    return lambda *arguments: None if rank() == which else act(*arguments)


def on_ranks(wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """Apply another function on ranks than on one device."""

    def either(*arguments: Any) -> Any:
        return wrong(*arguments) if dist.is_initialized() else right(*arguments)

    return either
