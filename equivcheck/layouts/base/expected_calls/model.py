"""The type that predicts a parallelism's communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.scenario import Layout, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """A situation for which the number of collective calls is not predicted."""

    reason: str
    """One sentence about the situation and the cause."""
    applies: Callable[[Training, Layout], bool]
    """Whether a scenario is in this situation."""
    ops: frozenset[str] | None = None
    """Unpredicted operations (`Call.op`), if others are predicted. None if no operation is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Predicts the collective calls of one parallelism, which is an argument of each function."""

    calls: Callable[[RankView, Any], Totals] = lambda _seat, _parallelism: {}
    """Calls on a rank that this parallelism causes."""
    hold: Callable[[RankView, Any], tuple[Held, ...]] = lambda view, _parallelism: view.held
    """A rank's parameter shards after this parallelism, as the next outer parallelism sees them."""
    open_bytes: frozenset[str] = frozenset()
    """Operations with predicted calls but unpredicted bytes, because the bytes depend on values."""
    unmodelled: tuple[Unpredicted, ...] = ()
    """Situations in which some or all operations are not predicted."""
    uneven: Callable[[Any], bool] = lambda _parallelism: False
    """Whether ranks along the parallelism's axes may communicate differently, or with ranks that are not along one axis."""
    sends_shards: bool = False
    """Whether the parallelism sends shards from other parallelisms, so that ranks along all axes may communicate differently."""


UNSAID = Unpredicted(reason="this parallelism does not predict its communication", applies=lambda _training, _layout: True)
NO_COMMUNICATION_MODEL = CommunicationModel(unmodelled=(UNSAID,))
"""Reason for parallelisms that have no communication model."""

OPTIMIZER_NOT_ELEMENTWISE = Unpredicted(
    reason="DTensor: communication of an optimizer that is not elementwise is not predicted: propagation decides it",
    applies=lambda training, _layout: not training.optimizer.elementwise,
)
"""Situation that makes calls unpredictable for all parallelisms with DTensor parameters."""
