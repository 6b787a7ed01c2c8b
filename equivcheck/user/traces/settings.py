"""Settings of an optimizer's groups once a training is over: a rate that no step has read yet is compared, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Slot, Trace

Settings = Mapping[str, Mapping[str, float]]
"""The numbers of the group of each parameter, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTrace(Trace):
    """What a user's training leaves."""

    settings: Settings
    """At the end."""
    low_precision: LowPrecision | MixedPrecision | None = None
    """What was seen to be rounded to other element types than parameters have; None for nothing."""
    casting: tuple[str, ...] = ()
    """Modules that cast what they are called with to the type that their parameters have while they are called, by name."""


def settings_of(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> Settings:
    """The settings of every parameter; those of one group are one object."""
    groups = [(group["params"], dict(_numbers(group))) for group in optimizer.param_groups]
    found = {id(parameter): numbers for parameters, numbers in groups for parameter in parameters}
    return {piece.name: found[id(slot.parameter)] for slot in slots for piece in slot.pieces if id(slot.parameter) in found}


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is a number, in a tuple or by itself; flags and choices of an implementation are none."""
    for key, value in group.items():
        if key != "params":
            several = isinstance(value, (tuple, list))
            for index, one in enumerate(value if several else [value]):
                if _is_number(one):
                    yield (f"{key}[{index}]" if several else key), float(one)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def other_settings(expected: UserTrace, traces: Sequence[UserTrace], limit: float) -> Divergence | None:
    """The first setting of a rank that is off by more than `limit` of its value; what only one of both has is no difference."""
    compared: set[tuple[int, int]] = set()
    for rank, trace in enumerate(traces):
        for name, numbers in trace.settings.items():
            own = expected.settings.get(name)
            if own is not None and (id(own), id(numbers)) not in compared:
                compared.add((id(own), id(numbers)))
                for key in _differing(own, numbers, limit):
                    return _divergence(len(expected.steps) - 1, f"{name}/{key}", rank, own[key], numbers[key])
    return None


def _differing(expected: Mapping[str, float], actual: Mapping[str, float], limit: float) -> Iterator[str]:
    return (key for key in expected if key in actual and not math.isclose(expected[key], actual[key], rel_tol=limit))


def _divergence(step: int, tensor: str, rank: int, expected: float, actual: float) -> Divergence:
    return Divergence(
        step=step,
        phase=Phase.STATE,
        tensor=tensor,
        difference=Difference.VALUE,
        rank=rank,
        expected=repr(expected),
        actual=repr(actual),
        error=math.inf,
    )
