"""The noise floor: how far the reference itself moves when its inputs move by one unit in the last place.

Tolerance is measured, not chosen. The reference is run again with every input, target and initial parameter multiplied by
``1 + eps * U(-1, 1)``; how far a tensor moves at a step is what rounding alone can do to it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from equivcheck.oracle.moments import moments
from equivcheck.oracle.tensors import Table, Vector, full_vector, norms, table_of
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import Training
from equivcheck.train.loop import train
from equivcheck.train.material import Batch, Material, material
from equivcheck.train.model import build_model
from equivcheck.train.setup import Setup
from equivcheck.train.trace import Trace

NUM_PERTURBATIONS = 4
"""Perturbed runs of the reference; enough for tensors of many elements (no false alarm in 400 honest runs at a factor of 3)."""
NUM_CONFIRMATIONS = 32
"""Further runs before a divergence is believed: for a scalar, four samples of noise are all small once in some thousand scenarios."""
FACTOR = 4.0
"""Tolerance over spread. The error of honest runs was at most 1.24 (float64), 1.60 (float32) and 2.41 (bfloat16) spreads."""
ABSOLUTE = 4.0
"""Tolerance for a tensor that is zero but for rounding, in units of eps times the largest norm of its kind in the step."""


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """One moment of the reference, with what rounding can do to it."""

    step: int
    """Step, from 0."""
    phase: Phase
    """Part of the step."""
    table: Table
    """Its tensors."""
    present: tuple[bool, ...]
    """Per tensor, whether it is there."""
    dtypes: tuple[str, ...]
    """Per tensor, its element type."""
    values: Vector
    """All elements, zero where absent."""
    norms: Vector
    """Norm of each tensor."""
    tolerances: Vector
    """Largest accepted norm of the error of each tensor."""
    scales: Vector
    """Largest norm among the tensors of the same kind: what a tolerance is small or large against."""


def perturbed_traces(training: Training, numbers: Iterable[int]) -> list[Trace]:
    """Traces of the reference on perturbed material, one for each of the given seeds."""
    return [_perturbed_trace(training, number) for number in numbers]


def _perturbed_trace(training: Training, number: int) -> Trace:
    generator = np.random.default_rng((training.seed, number))
    original = material(training)
    moved = Material(
        parameters={name: _perturb(values, generator) for name, values in original.parameters.items()},
        steps=tuple(tuple(_perturb_batch(batch, generator) for batch in step) for step in original.steps),
    )
    model = build_model(training.model, moved.parameters)
    return train(Setup(training=training, model=model, module=model), moved.steps)


def _perturb(values: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    numbers = values.numpy()
    factor = 1.0 + np.finfo(numbers.dtype).eps * generator.uniform(-1.0, 1.0, numbers.shape)
    return torch.from_numpy(np.asarray(numbers * factor.astype(numbers.dtype)))


def _perturb_batch(batch: Batch, generator: np.random.Generator) -> Batch:
    return Batch(inputs=_perturb(batch.inputs, generator), targets=_perturb(batch.targets, generator), masks=batch.masks)


def expected_moments(training: Training, reference: Trace, perturbed: list[Trace]) -> tuple[Expected, ...]:
    """Every moment of the reference with its tolerances."""
    eps = float(np.finfo(np.dtype(training.precision.value)).eps)
    others = [moments(trace) for trace in perturbed]
    tables: dict[int, Table] = {}
    found = []
    for index, moment in enumerate(moments(reference)):
        snapshot = moment.snapshot
        if id(snapshot.pieces) not in tables:
            tables[id(snapshot.pieces)] = table_of(snapshot.pieces)
        table = tables[id(snapshot.pieces)]
        values = full_vector(table, snapshot)
        moved = np.stack([full_vector(table, other[index].snapshot) for other in others])
        own = norms(table, values)
        scales = _scales(moment.phase, table, own)
        with np.errstate(invalid="ignore"):
            spread = norms(table, moved - values).max(axis=0)
        tolerances = FACTOR * np.maximum(spread, eps * own) + ABSOLUTE * eps * scales
        found.append(
            Expected(moment.step, moment.phase, table, snapshot.present, snapshot.dtypes, values, own, tolerances, scales)
        )
    return tuple(found)


def _scales(phase: Phase, table: Table, own: Vector) -> Vector:
    """The largest norm among tensors of the same kind: state by its key, since a second moment is no gradient."""
    if not len(own):
        return own
    if phase is not Phase.STATE:
        return np.full(len(own), np.nanmax(own, initial=0.0))
    keys = np.array([name.rpartition("/")[2] for name in table.names])
    scales = np.empty(len(own))
    for key in set(keys.tolist()):
        scales[keys == key] = np.nanmax(own[keys == key], initial=0.0)
    return scales
