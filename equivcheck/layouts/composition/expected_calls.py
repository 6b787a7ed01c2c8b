"""Predicts the calls on a scenario's ranks from its parallelisms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from equivcheck.layouts.base.expected_calls.communication import Totals, add
from equivcheck.layouts.base.expected_calls.model import Unpredicted
from equivcheck.layouts.base.expected_calls.passes import Span
from equivcheck.layouts.base.expected_calls.rank_view import RankView, full_parameters
from equivcheck.layouts.base.expected_calls.shared import count_reductions
from equivcheck.layouts.composition.registry import kind_of
from equivcheck.scenario import Layout, Training

KEPT_PREDICTIONS = 64
"""Maximum number of cached predictions, a few KiB each. Ranks with equal predictions share a prediction."""

UNPREDICTED_EXECUTION = (
    Unpredicted(
        reason="whole_step: communication is not predicted: the traced graph makes the calls, not wrappers and hooks",
        applies=lambda _training, layout: layout.execution.whole_step,
    ),
    Unpredicted(
        reason="torch.compile: communication is not predicted: compiled code may communicate in another order and in other "
        "pieces",
        applies=lambda _training, layout: layout.execution.is_compiled,
    ),
)
"""Execution modes that have no prediction with any parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Collective calls expected on one rank in training. Calls for setup and for recording tensors are left out."""

    totals: Totals
    """Expected calls and bytes by step, stage, operation and axes. Empty without a prediction."""
    reason: str = ""
    """Reason why there is no prediction; empty if there is a prediction."""
    left_out: tuple[Unpredicted, ...] = ()
    """Situations in which some calls are not predicted, although others are."""
    open_bytes: frozenset[str] = frozenset()
    """Operations whose calls are predicted but not their bytes."""

    def with_bytes_from(self, actual: Totals) -> Totals:
        """Return the expected calls with complete byte counts.

        Some calls' bytes depend on values in tensors. For these, the bytes in `actual`, the recorded calls, are used.
        """
        counted = {key: actual.get(key, (0, 0))[1] for key in self.totals if key[2] in self.open_bytes}
        return {key: (calls, counted.get(key, num_bytes)) for key, (calls, num_bytes) in self.totals.items()}

    @property
    def unmodelled(self) -> str:
        """Reason why some calls are not predicted. Empty if all calls are predicted."""
        return self.reason or "; ".join(unmodelled.reason for unmodelled in self.left_out)


def predict_calls(training: Training, layout: Layout, rank: int = 0) -> Prediction:
    """Return the collective calls expected on a rank, or the reason why they are not predicted."""
    return _predicted(training, layout, _coordinate(layout, rank))


@lru_cache(maxsize=KEPT_PREDICTIONS)
def _predicted(training: Training, layout: Layout, coordinate: tuple[int, ...]) -> Prediction:
    reason = next(_reasons(training, layout), "")
    if reason:
        return Prediction(totals={}, reason=reason)
    spans = (Span(layers=range(len(training.model.layers))),)
    view = RankView(training=training, layout=layout, coordinate=coordinate, held=full_parameters(training), spans=spans)
    for parallelism in layout.parallelisms:
        view = kind_of(parallelism).communication.restrict(view, parallelism)
    found: Totals = {}
    for parallelism in layout.parallelisms:
        communication = kind_of(parallelism).communication
        for key, (num_calls, num_bytes) in communication.calls(view, parallelism).items():
            add(found, key, num_calls, num_bytes)
        view = replace(view, held=communication.hold(view, parallelism))
    for key, (num_calls, num_bytes) in count_reductions(view).items():
        add(found, key, num_calls, num_bytes)
    left_out = tuple(each for each in _declared(training, layout) if not each.is_total)
    open_bytes = (kind_of(parallelism).communication.open_bytes for parallelism in layout.parallelisms)
    return Prediction(totals=found, left_out=left_out, open_bytes=frozenset[str]().union(*open_bytes))


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    """Index along each mesh axis; 0 if all ranks along the axis make the same calls."""
    mesh = layout.mesh
    uneven = {name for parallelism in layout.parallelisms for name in _uneven_axes(layout, parallelism)}
    return tuple(index if name in uneven else 0 for name, index in zip(mesh.names, mesh.coordinate(rank), strict=True))


def _uneven_axes(layout: Layout, parallelism: Any) -> tuple[str, ...]:
    communication = kind_of(parallelism).communication
    if communication.sends_shards:
        return layout.mesh.names
    return layout.axes_of(parallelism) if communication.uneven(parallelism) else ()


def _reasons(training: Training, layout: Layout) -> Iterator[str]:
    """Yield the reasons why nothing can be predicted."""
    yield from (unmodelled.reason for unmodelled in UNPREDICTED_EXECUTION if unmodelled.applies(training, layout))
    yield from (unmodelled.reason for unmodelled in _declared(training, layout) if unmodelled.is_total)


def _declared(training: Training, layout: Layout) -> Iterator[Unpredicted]:
    """Yield the situations in a scenario for which its parallelisms have no prediction."""
    for parallelism in layout.parallelisms:
        declared = kind_of(parallelism).communication.unmodelled
        yield from (unmodelled for unmodelled in declared if unmodelled.applies(training, layout))
