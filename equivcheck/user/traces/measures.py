"""Numbers of a user's training beside its verdict: what people look at first where many layouts stand in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.comparison.assemble import Assembler
from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Trace

_NOT_TRAINING = (Stage.SETUP, Stage.READING)
"""Stages whose calls are no part of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What the ranks of a training had in its first step, and what they communicate in a step that sets nothing up."""

    loss: float | None
    """Mean over the ranks that have one; None where no rank has."""
    expected_loss: float | None
    """That of one device."""
    gradient_norm: float
    """Of all gradients, each element as the first rank that holds it has it; what no rank holds counts as zero."""
    expected_gradient_norm: float
    """That of one device."""
    num_calls: int | None
    """Calls to communicate, of the rank that makes most, in its step with fewest; None in a world that does not see them."""
    num_bytes: int | None
    """Bytes that the rank which puts in most puts into those of such a step; None likewise."""

    @property
    def norm_ratio(self) -> float | None:
        """The ranks' gradient norm over that of one device; None where that is zero."""
        return self.gradient_norm / self.expected_gradient_norm if self.expected_gradient_norm else None


def measures_of(expected: Trace, gradients: Expected, traces: Sequence[Trace], calls: Sequence[Sequence[Call]]) -> Measures:
    """The numbers of ranks that all finished; `gradients` are those of the first step on one device."""
    assembled = Assembler().assemble(gradients, [trace.steps[0].gradients for trace in traces])
    losses = [trace.steps[0].loss for trace in traces]
    counted = [_of_a_step(rank, len(expected.steps)) for rank in calls]
    return Measures(
        loss=_mean([loss for loss in losses if loss is not None]),
        expected_loss=expected.steps[0].loss,
        gradient_norm=float(np.linalg.norm(assembled.values[assembled.covered])),
        expected_gradient_norm=float(np.linalg.norm(gradients.values)),
        num_calls=max((num_calls for num_calls, _ in counted), default=None),
        num_bytes=max((num_bytes for _, num_bytes in counted), default=None),
    )


def first_gradients(moments: Iterable[Expected]) -> Expected | None:
    """The moment of a reference that `measures_of` asks for; None where it is lost before."""
    return next((moment for moment in moments if moment.phase is Phase.GRADIENT), None)


def _of_a_step(calls: Sequence[Call], num_steps: int) -> tuple[int, int]:
    """Calls and bytes of one rank in the step that has fewest: others may set something up, as DDP does its buckets."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for call in calls:
        if call.stage not in _NOT_TRAINING:
            steps[call.step].append(call.num_bytes)
    return min((len(found), sum(found)) for found in steps)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
