"""What a kind of parallelism is expected to communicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.scenario import Layout, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmodelled:
    """Something that runs, but whose communication has no model."""

    reason: str
    """One sentence for people: what, and why."""
    applies: Callable[[Training, Layout], bool]
    """Whether a scenario has it."""
    ops: frozenset[str] | None = None
    """The calls that have none, as `Call.op` names them, others being predicted; None where none are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Which calls one kind of parallelism makes; `Any` is its noun."""

    options: frozenset[str] = frozenset()
    """Fields of the noun that are taken into account; where another has not its default, no calls are predicted."""
    calls: Callable[[RankView, Any], Totals] = lambda _seat, _parallelism: {}
    """What a rank communicates because of it in all steps."""
    hold: Callable[[RankView, Any], tuple[Held, ...]] = lambda view, _parallelism: view.held
    """What a rank holds of each parameter, as parallelisms around this one find it."""
    open_bytes: frozenset[str] = frozenset()
    """Ops whose calls are predicted, but not their bytes, which depend on values."""
    unmodelled: tuple[Unmodelled, ...] = ()
    """Where no calls are predicted, or not those of some ops."""
    uneven: Callable[[Any], bool] = lambda _parallelism: False
    """Whether ranks along its axes may communicate differently, or with others than those along an axis."""
    sends_shards: bool = False
    """Whether it sends what others have cut, so that ranks along all axes may communicate differently."""


UNSAID = Unmodelled(reason="this parallelism does not predict its communication", applies=lambda _training, _layout: True)
NO_COMMUNICATION_MODEL = CommunicationModel(unmodelled=(UNSAID,))
"""For those that say nothing."""

MIXED_ELEMENTS = Unmodelled(
    reason="DTensor: communication of an optimizer that is not elementwise is not predicted: propagation decides it",
    applies=lambda training, _layout: not training.optimizer.elementwise,
)
"""For those whose parameters are DTensors."""
