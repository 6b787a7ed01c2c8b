"""The noise floor: how far the reference itself moves when its inputs move by one unit in the last place.

Tolerance is measured, not chosen. The reference is run again with every input, target and initial parameter multiplied by
``1 + eps * U(-1, 1)``; how far a tensor moves at a step is what rounding alone can do to it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch

from equivcheck.scenario import Training
from equivcheck.training.copies import MakeSetup, train_copies
from equivcheck.training.ensemble import EnsembleTrace, train_ensemble
from equivcheck.training.material import Batch, material
from equivcheck.training.single_device import single_device
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import Moment, ValueTrace, moments
from equivcheck.worlds.trace.tensors import Numbers, Table, Vector, full_vector, norms, table_of
from equivcheck.worlds.trace.trace import Trace

NUM_PERTURBATIONS = 8
"""Perturbed runs of the reference; four are enough for tensors of many elements (no false alarm in 400 honest runs)."""
NUM_CONFIRMATIONS = 32
"""Further runs before a divergence is believed: of a scalar, a few samples of noise are all tiny now and then."""
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
    shifts: Vector
    """Norm of what the same training is off by when it is computed on one device in another order."""


def perturbed(training: Training, num_copies: int, make_setup: MakeSetup = single_device) -> EnsembleTrace:
    """What copies of the reference leave: one as it is, then `num_copies` moved by one unit in the last place.

    All at once where the copies do not mix: where `make_setup` is left as it is, and the optimizer elementwise.
    """
    parameters, steps = perturbed_material(training, num_copies, eps_of(training.precision.value))
    if training.optimizer.elementwise and make_setup is single_device:
        return train_ensemble(training, parameters, steps)
    return train_copies(training, parameters, steps, make_setup)


def perturbed_material(
    training: Training, num_copies: int, eps: float
) -> tuple[dict[str, torch.Tensor], tuple[tuple[Batch, ...], ...]]:
    """Parameters and steps with the copies as first dim: one as it is, then `num_copies` moved by up to `eps` of each value."""
    generator = np.random.default_rng((training.seed, num_copies))
    original = material(training)
    parameters = {name: _perturb(values, num_copies, eps, generator) for name, values in original.parameters.items()}
    steps = tuple(tuple(_perturb_batch(batch, num_copies, eps, generator) for batch in step) for step in original.steps)
    return parameters, steps


def eps_of(kind: str) -> float:
    """The unit in the last place of 1 in an element type."""
    return float(torch.finfo(getattr(torch, kind)).eps)


def _own_eps(kinds: Sequence[str]) -> Vector:
    return np.array([eps_of(kind) if kind.startswith("float") else 0.0 for kind in kinds])


def _perturb(values: torch.Tensor, num_copies: int, eps: float, generator: np.random.Generator) -> torch.Tensor:
    if not values.is_floating_point():
        return values.expand(1 + num_copies, *values.shape)
    numbers = values.numpy()
    factors = 1.0 + eps * generator.uniform(-1.0, 1.0, (1 + num_copies, *numbers.shape))
    factors[0] = 1.0
    return torch.from_numpy(numbers * factors.astype(numbers.dtype))


def _perturb_batch(batch: Batch, num_copies: int, eps: float, generator: np.random.Generator) -> Batch:
    inputs, targets = (_perturb(values, num_copies, eps, generator) for values in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def expected_moments(
    training: Training, reference: Trace, copies: EnsembleTrace, *others: Trace, eps: float | None = None
) -> tuple[Expected, ...]:
    """Every moment of the reference with its tolerances.

    What it is off by from any of `others`, the same training summed in other ways, counts as spread. `eps` is the unit of
    rounding, that of the training's precision unless given.
    """
    eps = eps_of(training.precision.value) if eps is None else eps
    return expected_of(reference, _moved(copies), eps, *others)


def expected_of(
    reference: Trace | ValueTrace, moved: Iterable[Numbers | None], eps: float | None, *others: Trace
) -> tuple[Expected, ...]:
    """Every moment of a reference with its tolerances, from the values of each moment in all copies, as rows, the first as it is.

    None stands for a moment in which rounding changes nothing; `others` are the same training summed in other ways. `eps` is the
    unit of rounding; None for that of each tensor's own element type, 0 of integers and booleans.
    """
    tables: dict[int, Table] = {}
    found = []
    again: Iterable[tuple[Moment, ...]] = zip(*map(moments, others), strict=True) if others else repeat(())
    for moment, copies, same in zip(moments(reference), moved, again, strict=bool(others)):
        pieces = moment.snapshot.pieces
        if id(pieces) not in tables:
            tables[id(pieces)] = table_of(pieces)
        unit = _own_eps(moment.snapshot.dtypes) if eps is None else eps
        found.append(_expected(moment, tables[id(pieces)], unit, _noise(moment, tables[id(pieces)], copies, same)))
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


def _noise(moment: Moment, table: Table, moved: Numbers | None, again: tuple[Moment, ...]) -> tuple[Vector, Vector]:
    """How far each tensor moves at most when its inputs do or sums are others, and how far when copies train at once."""
    if moved is None:
        return np.zeros(len(table.names)), np.zeros(len(table.names))
    present = moment.snapshot.present
    values, copies = (full_vector(table, present, numbers) for numbers in (moment.snapshot.values, moved))
    with np.errstate(invalid="ignore", over="ignore"):
        spread, shift = norms(table, copies[1:] - copies[0]).max(axis=0), norms(table, copies[0] - values)
        summed = [norms(table, full_vector(table, present, other.snapshot.values) - values) for other in again]
    return np.maximum.reduce([spread, *([shift, *summed] if again else ())]), shift


def _expected(moment: Moment, table: Table, eps: float | Vector, noise: tuple[Vector, Vector]) -> Expected:
    snapshot = moment.snapshot
    values = full_vector(table, snapshot.present, snapshot.values)
    own = norms(table, values)
    scales = scales_of(moment.phase, table, own)
    spread, shifts = noise
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
        shifts=shifts,
    )


def scales_of(phase: Phase, table: Table, own: Vector) -> Vector:
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
