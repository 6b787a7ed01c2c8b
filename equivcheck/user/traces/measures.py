"""Summarizes a training in a few numbers, for a table of many layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.comparison.assemble import Assembler
from equivcheck.oracle.comparison.compare import snapshots_of
from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import moments
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Trace

_NOT_TRAINING = (Stage.SETUP, Stage.READING)
"""Stages whose calls do not belong to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Loss and gradient norm at the first step, and communication in a step."""

    loss: float | None
    """Mean loss over data ranks at the first step; None if no rank has a loss."""
    expected_loss: float | None
    """Loss at the first step of the single-device run."""
    gradient_norm: float
    """Norm over all gradients at the first step. Each element comes from the first rank with it, or is zero if there is none."""
    expected_gradient_norm: float
    """Norm over all gradients at the first step of the single-device run."""
    num_calls: int | None
    """Collective calls by the busiest rank in its shortest step. None if the world does not record calls."""
    num_bytes: int | None
    """Bytes sent by the busiest rank in its shortest step. None if the world does not record calls."""

    @property
    def norm_ratio(self) -> float | None:
        """Gradient norm on ranks, divided by the norm on one device; None if the latter is zero."""
        return self.gradient_norm / self.expected_gradient_norm if self.expected_gradient_norm else None


def measures_of(
    expected: Trace,
    gradients: Expected,
    traces: Sequence[Trace],
    calls: Sequence[Sequence[Call]],
    loss_groups: Sequence[Sequence[int]],
) -> Measures:
    """Compute the `Measures` of a training whose ranks have all finished.

    `gradients` are the expected gradients at the first step, from one device. `calls` has each rank's communication calls.
    `loss_groups` has the groups of ranks that must return the same loss.
    """
    assembled = Assembler().assemble(gradients, [trace.steps[0].gradients for trace in traces])
    losses = snapshots_of([moments(trace)[0] for trace in traces], Phase.LOSS, loss_groups)[0]
    counted = [_calls_per_step(rank, len(expected.steps)) for rank in calls]
    return Measures(
        loss=float(losses.values[0]) if losses.present[0] else None,
        expected_loss=expected.steps[0].loss,
        gradient_norm=float(np.linalg.norm(assembled.values[assembled.covered])),
        expected_gradient_norm=float(np.linalg.norm(gradients.values)),
        num_calls=max((num_calls for num_calls, _ in counted), default=None),
        num_bytes=max((num_bytes for _, num_bytes in counted), default=None),
    )


def first_gradients(moments: Iterable[Expected]) -> Expected | None:
    """Return the gradients at the first step, for `measures_of`. None if the reference does not contain them."""
    return next((moment for moment in moments if moment.phase is Phase.GRADIENT), None)


def _calls_per_step(calls: Sequence[Call], num_steps: int) -> tuple[int, int]:
    """Return calls and bytes in the step with the fewest calls. Other steps may contain setup, such as DDP's bucket rebuild."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for call in calls:
        if call.stage not in _NOT_TRAINING:
            steps[call.step].append(call.num_bytes)
    return min((len(found), sum(found)) for found in steps)
