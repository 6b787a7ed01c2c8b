"""Records optimizer settings at the end of a training. They are compared because no later step reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.training.update.settings import Settings, is_number
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Snapshot, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A training's state between two steps."""

    parameters: Snapshot
    """Parameters."""
    state: Snapshot
    """Optimizer state; names are ``parameter/key``."""
    buffers: Snapshot
    """Buffers."""
    settings: Settings
    """All optimizers' settings, such as learning rates."""
    progress: Mapping[str, float]
    """Numbers in the scheduler's state; empty if there is no scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTrace(Trace):
    """Trace of a user's training, on one device or on one rank."""

    settings: Settings
    """Optimizer settings after the last step."""
    low_precision: LowPrecision | MixedPrecision | None = None
    """Low precision in which modules ran on a rank; None if they ran in none."""
    casting: tuple[str, ...] = ()
    """Names of modules that cast their inputs, such as FSDP2 units."""
    checkpoint: TrainingState | None = None
    """State when the checkpoint was saved, or after it was loaded; None if there is no checkpoint."""


def numbers_in(state: Any, path: str = "") -> dict[str, float]:
    """Return the numbers in a nested state dict, by path such as ``last_epoch``."""
    if isinstance(state, Mapping):
        rows = list(state.items())
    elif isinstance(state, (list, tuple)):
        rows = list(enumerate(state))
    else:
        return {path: float(state)} if is_number(state) else {}
    rows = [(key, value) for key, value in rows if key not in ("_step_count", "_last_lr")]  # schedulers only report these
    return {name: number for key, value in rows for name, number in numbers_in(value, f"{path}.{key}".strip(".")).items()}


def other_settings(expected: UserTrace, traces: Sequence[UserTrace], limit: float) -> Divergence | None:
    """Return the first optimizer setting by which ranks differ from one device by more than the relative `limit`.

    Settings that only one side has are ignored.
    """
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
