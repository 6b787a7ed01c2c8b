"""What a scenario's ranks will communicate, as far as its parallelisms can say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from equivcheck.layouts.base.expected_calls.communication import Totals, add
from equivcheck.layouts.base.expected_calls.model import Unmodelled
from equivcheck.layouts.base.expected_calls.rank_view import RankView, whole_parameters
from equivcheck.layouts.base.expected_calls.shared import sums_of_counts
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import Layout, Training

KEPT_PREDICTIONS = 64
"""Predictions kept, a few KiB each: ranks that sit alike share one, and so do the runs of a training with other numbers."""

UNMODELLED_EXECUTION = (
    Unmodelled(
        reason="whole_step: communication is not predicted: the graph of the step decides it, not wrappers and hooks",
        applies=lambda _training, layout: layout.execution.whole_step,
    ),
    Unmodelled(
        reason="torch.compile: communication is not predicted: compiled code may communicate in another order and in other "
        "pieces",
        applies=lambda _training, layout: layout.execution.is_compiled,
    ),
)
"""Ways to run that cannot be predicted, whatever the parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one rank will communicate, without setup and reading."""

    totals: Totals
    """Calls and bytes by step, stage, op and axes; empty where there is no prediction, too."""
    reason: str = ""
    """Why there is no prediction; empty where there is one."""
    left_out: tuple[Unmodelled, ...] = ()
    """What is communicated beside that, and is not predicted."""
    open_bytes: frozenset[str] = frozenset()
    """Ops of which only calls are predicted."""

    def beside(self, actual: Totals) -> Totals:
        """What is expected, with the bytes that were counted where they depend on values."""
        counted = {key: actual.get(key, (0, 0))[1] for key in self.totals if key[2] in self.open_bytes}
        return {key: (calls, counted.get(key, num_bytes)) for key, (calls, num_bytes) in self.totals.items()}

    @property
    def unmodelled(self) -> str:
        """Why not all calls are predicted; empty where they are."""
        return self.reason or "; ".join(unmodelled.reason for unmodelled in self.left_out)

    @property
    def ops_left_out(self) -> frozenset[str]:
        """The ops of calls that are not predicted beside others that are."""
        return frozenset().union(*(unmodelled.ops or () for unmodelled in self.left_out))


def predicted(training: Training, layout: Layout, rank: int = 0) -> Prediction:
    """What a rank of a scenario will communicate, or why that cannot be said."""
    return _predicted(training, layout, _coordinate(layout, rank))


@lru_cache(maxsize=KEPT_PREDICTIONS)
def _predicted(training: Training, layout: Layout, coordinate: tuple[int, ...]) -> Prediction:
    reason = next(_reasons(training, layout), "")
    if reason:
        return Prediction(totals={}, reason=reason)
    view = RankView(training=training, layout=layout, coordinate=coordinate, held=whole_parameters(training))
    found: Totals = sums_of_counts(view)
    for parallelism in layout.parallelisms:
        communication = kind_of(parallelism).communication
        for key, (num_calls, num_bytes) in communication.calls(view, parallelism).items():
            add(found, key, num_calls, num_bytes)
        view = replace(view, held=communication.hold(view, parallelism))
    left_out = tuple(each for each in _declared(training, layout) if each.ops is not None)
    open_bytes = (kind_of(parallelism).communication.open_bytes for parallelism in layout.parallelisms)
    return Prediction(totals=found, left_out=left_out, open_bytes=frozenset[str]().union(*open_bytes))


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    """Indices along the axes of the mesh; 0 along those whose ranks communicate alike."""
    mesh = layout.mesh
    uneven = {name for parallelism in layout.parallelisms for name in _uneven_axes(layout, parallelism)}
    return tuple(index if name in uneven else 0 for name, index in zip(mesh.names, mesh.coordinate(rank), strict=True))


def _uneven_axes(layout: Layout, parallelism: Any) -> tuple[str, ...]:
    communication = kind_of(parallelism).communication
    if communication.sends_shards:
        return layout.mesh.names
    return layout.axes_of(parallelism) if communication.uneven(parallelism) else ()


def _reasons(training: Training, layout: Layout) -> Iterator[str]:
    """Why nothing can be predicted: what predictions do not know of, then what they know that they cannot say."""
    yield from (unmodelled.reason for unmodelled in UNMODELLED_EXECUTION if unmodelled.applies(training, layout))
    yield from (unmodelled.reason for unmodelled in _declared(training, layout) if unmodelled.ops is None)


def _declared(training: Training, layout: Layout) -> Iterator[Unmodelled]:
    """What parallelisms say that they do not model of a scenario."""
    for parallelism in layout.parallelisms:
        declared = kind_of(parallelism).communication.unmodelled
        yield from (unmodelled for unmodelled in declared if unmodelled.applies(training, layout))
