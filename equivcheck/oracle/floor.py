"""The noise floor: how far the reference itself moves when its inputs move by one unit in the last place.

Tolerance is measured, not chosen. The reference is run again with every input, target and initial parameter multiplied by
``1 + eps * U(-1, 1)``; how far a tensor moves at a step is what rounding alone can do to it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from equivcheck.oracle.moments import Moment, moments
from equivcheck.oracle.tensors import Numbers, Table, Vector, full_vector, norms, table_of
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import Training
from equivcheck.train.ensemble import EnsembleTrace, train_ensemble
from equivcheck.train.material import Batch, material
from equivcheck.train.trace import Trace

NUM_PERTURBATIONS = 4
"""Perturbed runs of the reference; enough for tensors of many elements (no false alarm in 400 honest runs at a factor of 3)."""
NUM_CONFIRMATIONS = 32
"""Further runs before a divergence is believed: of a scalar, all four samples of noise are tiny once in some thousand scenarios."""
FACTOR = 4.0
"""Tolerance over spread. The error of honest runs was at most 1.24 (float64), 1.60 (float32) and 2.41 (bfloat16) spreads."""
ABSOLUTE = 4.0
"""Tolerance for a tensor that is zero but for rounding, in units of eps times the largest norm of its kind in the step."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
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


def perturbed(training: Training, num_copies: int) -> EnsembleTrace:
    """What copies of the reference leave, each with material of its own moved by one unit in the last place; all in one pass."""
    generator = np.random.default_rng((training.seed, num_copies))
    original = material(training)
    parameters = {name: _perturb(values, num_copies, generator) for name, values in original.parameters.items()}
    steps = tuple(tuple(_perturb_batch(batch, num_copies, generator) for batch in step) for step in original.steps)
    return train_ensemble(training, parameters, steps)


def _perturb(values: torch.Tensor, num_copies: int, generator: np.random.Generator) -> torch.Tensor:
    numbers = values.numpy()
    factors = 1.0 + np.finfo(numbers.dtype).eps * generator.uniform(-1.0, 1.0, (num_copies, *numbers.shape))
    return torch.from_numpy(numbers * factors.astype(numbers.dtype))


def _perturb_batch(batch: Batch, num_copies: int, generator: np.random.Generator) -> Batch:
    inputs, targets = (_perturb(values, num_copies, generator) for values in (batch.inputs, batch.targets))
    return Batch(inputs=inputs, targets=targets, masks=batch.masks)


def expected_moments(training: Training, reference: Trace, copies: EnsembleTrace) -> tuple[Expected, ...]:
    """Every moment of the reference with its tolerances."""
    eps = float(np.finfo(np.dtype(training.precision.value)).eps)
    tables: dict[int, Table] = {}
    found = []
    for moment, moved in zip(moments(reference), _moved(copies), strict=True):
        pieces = moment.snapshot.pieces
        if id(pieces) not in tables:
            tables[id(pieces)] = table_of(pieces)
        found.append(_expected(moment, tables[id(pieces)], moved, eps))
    return tuple(found)


def _moved(copies: EnsembleTrace) -> Iterator[Numbers | None]:
    """The values of each moment in all copies, in the order of `moments`; None where rounding changes nothing."""
    for step in copies.steps:
        yield step.loss[:, None]
        yield step.gradients
        if step.clip_norm is not None:
            yield step.clip_norm[:, None]
        if step.clipped is not None:
            yield step.clipped
        yield step.parameters
    yield copies.state
    yield None


def _expected(moment: Moment, table: Table, moved: Numbers | None, eps: float) -> Expected:
    snapshot = moment.snapshot
    values = full_vector(table, snapshot.present, snapshot.values)
    own = norms(table, values)
    scales = _scales(moment.phase, table, own)
    spread = np.zeros(len(own)) if moved is None else _spread(table, values, full_vector(table, snapshot.present, moved))
    return Expected(
        step=moment.step,
        phase=moment.phase,
        table=table,
        present=snapshot.present,
        dtypes=snapshot.dtypes,
        values=values,
        norms=own,
        tolerances=FACTOR * np.maximum(spread, eps * own) + ABSOLUTE * eps * scales,
        scales=scales,
    )


def _spread(table: Table, values: Vector, moved: Numbers) -> Vector:
    """How far each tensor moves at most."""
    with np.errstate(invalid="ignore", over="ignore"):
        spread: Vector = norms(table, moved - values).max(axis=0)
    return spread


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
