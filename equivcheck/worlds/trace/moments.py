"""Splits a trace into moments. A moment has one rank's recorded tensors from one phase of one step.

Moments are ordered as in the search for the first divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Piece, Snapshot, Step, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One rank's recorded tensors at one compared point: a phase in a step."""

    step: int
    """Step, from 0; the last step for state and buffers."""
    phase: Phase
    """Phase within the step."""
    snapshot: Snapshot
    """The recorded tensors."""
    full: Snapshot | None = None
    """`full_tensor()` for each of these tensors; None if it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTrace:
    """One rank's recorded values from a run other than a training, for example from a tensor program."""

    moments: tuple[Moment, ...]
    """Moments in the search order for the first divergence."""


def moments(trace: Trace | ValueTrace) -> list[Moment]:
    """Split a trace into moments, in the order in which the first divergence is searched.

    All traces of a training have the same number of moments.
    """
    if isinstance(trace, ValueTrace):
        return list(trace.moments)
    last = len(trace.steps) - 1
    steps = [*trace.steps[:-1], *(replace(step, buffers=None) for step in trace.steps[-1:])]  # its buffers are the final ones
    found = [moment for index, step in enumerate(steps) for moment in _of_step(index, step)]
    ends = (trace.state, trace.buffers)
    return found + [Moment(step=last, phase=phase, snapshot=end) for phase, end in zip(_AT_THE_END, ends, strict=True)]


def moments_of_steps(traces: Sequence[Trace]) -> list[tuple[Moment, ...]]:
    """Split all ranks' traces into moments. Each tuple has the same moment from every rank.

    The final optimizer state and buffers are left out.
    """
    steps = ([moment for index, step in enumerate(trace.steps) for moment in _of_step(index, step)] for trace in traces)
    return list(zip(*steps, strict=True))


def _of_step(index: int, step: Step) -> list[Moment]:
    found = [
        Moment(step=index, phase=Phase.LOSS, snapshot=_scalar(_LOSS, step.loss)),
        Moment(step=index, phase=Phase.GRADIENT, snapshot=step.gradients, full=step.full_gradients),
    ]
    if step.clip_norm is not None:
        found.append(Moment(step=index, phase=Phase.CLIPPING, snapshot=_scalar(_NORM, step.clip_norm)))
    if step.clipped is not None:
        found.append(Moment(step=index, phase=Phase.CLIPPING, snapshot=step.clipped))
    found.append(Moment(step=index, phase=Phase.UPDATE, snapshot=step.parameters, full=step.full_parameters))
    if step.reported is not None:
        found.append(Moment(step=index, phase=Phase.REPORTED, snapshot=step.reported))
    if step.buffers is not None:
        found.append(Moment(step=index, phase=Phase.BUFFER, snapshot=step.buffers))
    return found


_AT_THE_END = (Phase.STATE, Phase.BUFFER)
_LOSS = (Piece(name="loss", shape=()),)
_NORM = (Piece(name="norm", shape=()),)


def _scalar(pieces: tuple[Piece, ...], value: float | None) -> Snapshot:
    if value is None:
        return Snapshot(pieces=pieces, present=(False,), fits=(False,), dtypes=("",), values=np.empty(0))
    return Snapshot(pieces=pieces, present=(True,), fits=(True,), dtypes=("float64",), values=np.array([value]))
