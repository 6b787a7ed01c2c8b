"""The type that predicts a parallelism's communication."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from equivcheck.layouts.base.expected_calls.communication import Key, Totals, axes_along
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
    """Unpredicted operations (`Call.op`). None if no operation is predicted."""
    axes: Callable[[Layout], Collection[str]] | None = None
    """Returns the mesh axes along which `ops` are not predicted. None if they are unpredicted along all axes."""

    @property
    def is_total(self) -> bool:
        """Whether no call is predicted in this situation."""
        return self.ops is None and self.axes is None

    def leaves_out(self, key: Key, layout: Layout) -> bool:
        """Whether calls with this key are unpredicted. Keys do not name axes of one rank, so along these all `ops` are."""
        _, _, op, group = key
        is_along = self.axes is None or not group or not axes_along(group, layout.mesh).isdisjoint(self.axes(layout))
        return is_along and (self.ops is None or op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationModel:
    """Functions to predict one parallelism's collective calls. Each function gets the parallelism as an argument."""

    calls: Callable[[RankView, Any], Totals] = lambda _seat, _parallelism: {}
    """Returns the collective calls on a rank caused by this parallelism."""
    restrict: Callable[[RankView, Any], RankView] = lambda view, _parallelism: view
    """Returns the rank with only those modules that this parallelism leaves on it, before any parallelism is applied."""
    hold: Callable[[RankView, Any], tuple[Held, ...]] = lambda view, _parallelism: view.held
    """Returns a rank's parameter shards after this parallelism is applied, as the next outer parallelism sees them."""
    open_bytes: frozenset[str] = frozenset()
    """Operations whose calls are predicted but not their bytes, because the bytes depend on values."""
    unmodelled: tuple[Unpredicted, ...] = ()
    """Situations in which some or all operations are not predicted."""
    uneven: Callable[[Any], bool] = lambda _parallelism: False
    """Returns whether ranks along the parallelism's axes may make different calls, or use groups not along one axis."""
    sends_shards: bool = False
    """Whether the parallelism sends other parallelisms' shards. Ranks along all axes may then make different calls."""


UNSAID = Unpredicted(reason="this parallelism does not predict its communication", applies=lambda _training, _layout: True)
NO_COMMUNICATION_MODEL = CommunicationModel(unmodelled=(UNSAID,))
"""Model for parallelisms without any prediction."""

OPTIMIZER_NOT_ELEMENTWISE = Unpredicted(
    reason="DTensor: communication of an optimizer that is not elementwise is not predicted: DTensor's propagation chooses the "
    "collectives",
    applies=lambda training, _layout: not training.optimizer.elementwise,
)
"""Situation that makes calls unpredictable for all parallelisms with DTensor parameters."""
