"""Train several model copies one after the other, if `train_ensemble` cannot train them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from equivcheck.scenario import Training
from equivcheck.training.choices import RecordedChoices
from equivcheck.training.ensemble import Array, EnsembleStep, EnsembleTrace
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.trace import Snapshot, Step, Trace

Choices = tuple[torch.Tensor, ...]
"""Routing in all forwards during a step."""

MakeSetup = Callable[[Training, Mapping[str, torch.Tensor]], Setup]
"""Builds a copy's setup from its initial parameters."""


def train_copies(
    training: Training,
    parameters: Mapping[str, torch.Tensor],
    steps: Sequence[Sequence[Batch]],
    make_setup: MakeSetup = single_device_setup,
) -> EnsembleTrace:
    """Train model copies one after the other, with the arguments and result described in `train_ensemble`."""
    copies = len(next(iter(parameters.values())))
    runs = [_train_copy(training, parameters, steps, make_setup, copy) for copy in range(copies)]
    found = stack_traces([trace for trace, _ in runs])
    alike = [
        all(torch.equal(one, first) for other in copies for one, first in zip(other, copies[0], strict=True))
        for copies in zip(*(choices for _, choices in runs), strict=True)
    ]
    kept = (replace(step, routes_alike=same) for step, same in zip(found.steps, alike, strict=True))
    return replace(found, steps=tuple(kept))


def _train_copy(
    training: Training,
    parameters: Mapping[str, torch.Tensor],
    steps: Sequence[Sequence[Batch]],
    make_setup: MakeSetup,
    copy: int,
) -> tuple[Trace, list[Choices]]:
    setup = make_setup(training, {name: values[copy] for name, values in parameters.items()})
    recorded, choices = RecordedChoices(setup.model), list[Choices]()
    setup.before_update.append(lambda _optimizer, _step: choices.append(recorded.take_all()))
    own = [[replace(batch, inputs=batch.inputs[copy], targets=batch.targets[copy]) for batch in step] for step in steps]
    return train(setup, own), choices


def stack_traces(traces: Sequence[Trace]) -> EnsembleTrace:
    """Stack the traces from several single-device runs along a new dim 0."""
    steps = tuple(_step(rows) for rows in zip(*(trace.steps for trace in traces), strict=True))
    state = [trace.state for trace in traces]
    return EnsembleTrace(steps=steps, state_names=tuple(piece.name for piece in state[0].pieces), state=_rows(state))


def _step(rows: tuple[Step, ...]) -> EnsembleStep:
    first = rows[0]
    clipped = [row.clipped for row in rows if row.clipped is not None]
    return EnsembleStep(
        loss=np.array([row.loss for row in rows]),
        present=first.gradients.present,
        gradients=_rows([row.gradients for row in rows]),
        clip_norm=None if first.clip_norm is None else np.array([row.clip_norm for row in rows], dtype=np.float64),
        clipped=_rows(clipped) if clipped else None,
        parameters=_rows([row.parameters for row in rows]),
    )


def _rows(snapshots: Sequence[Snapshot]) -> Array:
    return np.stack([snapshot.values for snapshot in snapshots])
