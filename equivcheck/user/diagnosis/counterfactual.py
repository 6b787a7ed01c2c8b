"""What a counterfactual of a user's training is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.traces.settings import UserTrace

Change = Callable[[EmulatedRanks], None]
"""Makes an honest emulation wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """What is known of the step of one device, from an emulation in which nothing is wrong."""

    own_rows: bool
    """Whether the mean over ranks, each on its own rows, is what one device computes with all."""
    num_backward: int
    """Backward passes of a step."""
    clips: bool
    """Whether it clips by `torch.nn.utils.clip_grad_norm_`."""
    differs: bool
    """Whether ranks on their own rows leave something else than one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """One way to be wrong."""

    cause: Cause
    """In a word."""
    sentence: str
    """What is wrong, for people, without a full stop."""
    change: Change
    """Makes ranks wrong."""
    own_rows: bool = False
    """Whether each rank must compute on its own rows, where one device could do with all."""

    def run(self, diverged: DivergedTraining, num_steps: int, honest: Honest) -> tuple[UserTrace, ...]:
        """What the ranks would leave."""
        emulated = EmulatedRanks(diverged, own_rows=honest.own_rows or self.own_rows)
        emulated.num_backward = honest.num_backward
        self.change(emulated)
        return emulated.train(num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """At which steps something is wrong."""

    first: int
    """The first of them."""
    last: int | None = None
    """The last; None for all that follow."""

    def __contains__(self, step: int) -> bool:
        return step >= self.first and (self.last is None or step <= self.last)

    @property
    def words(self) -> str:
        """After a comma, unless it is at every step."""
        if self.last is not None:
            return f", at step {self.first} only"
        return f", from step {self.first} on" if self.first else ""


def spans(diverged: DivergedTraining) -> tuple[Span, ...]:
    """The steps at which a fault may be that shows first where the ranks first differ."""
    first = diverged.first.step
    single = (Span(first=first, last=first),) if len(diverged.task.batches) > 1 else ()
    return (Span(first=first), *single) if first else (Span(first=0), *single)


def mixed(wrong: torch.Tensor, right: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Wrong elements where a mask says so; None for everywhere."""
    return wrong if mask is None else torch.where(mask, wrong, right)


def pick(masks: Mapping[str, torch.Tensor] | None, name: str) -> tuple[bool, torch.Tensor | None]:
    """Whether any element of a tensor is meant, and which; None for all."""
    if masks is None:
        return True, None
    return name in masks, masks.get(name)
