"""The noise floor: how much the single-device run changes if its inputs change by one unit in the last place.

Tolerances are measured. The single-device training runs again with each input, target and initial parameter multiplied by ``1 +
eps * U(-1, 1)``. The change of a tensor at a step is its rounding noise.
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
from equivcheck.training.loop import single_device_setup
from equivcheck.training.material import Batch, material
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.moments import Moment, ValueTrace, moments
from equivcheck.worlds.trace.tensors import Numbers, Table, Vector, full_vector, norms, table_of
from equivcheck.worlds.trace.trace import Trace

NUM_PERTURBATIONS = 8
"""Number of perturbed runs. Four are enough for tensors with many elements (no false alarm in 400 correct runs)."""
NUM_CONFIRMATIONS = 32
"""Number of further runs before a divergence is reported, because a scalar's noise can be tiny in a few samples."""
FACTOR = 4.0
"""Tolerance divided by spread. Correct runs differed by at most 1.24 (float64), 1.60 (float32) and 2.41 (bfloat16) spreads."""
ABSOLUTE = 4.0
"""Tolerance for a tensor that should be zero, relative to eps times the largest norm of its kind in the step."""
BLOCK = 2**18
"""Maximum elements in a block with several copies."""
Copies = Numbers | Sequence[Numbers]
"""Values in each copy, one row a copy."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Expected:
    """Values in the reference at one point in training, with the tolerance for each tensor."""

    step: int
    """Step, from 0."""
    phase: Phase
    """Phase within the step."""
    table: Table
    """Names and shapes of the tensors, and their positions in the flat vector."""
    present: tuple[bool, ...]
    """For each tensor, True if it exists."""
    dtypes: tuple[str, ...]
    """Element type per tensor."""
    values: Vector
    """All elements in one flat vector. Zero if a tensor does not exist."""
    norms: Vector
    """Norm for each tensor."""
    tolerances: Vector
    """Largest accepted error norm for each tensor."""
    scales: Vector
    """For each tensor, the largest norm among tensors of the same kind. Noise is judged relative to this norm."""
    shifts: Vector
    """For each tensor, the distance between two ways to run the same training on one device."""


def perturbed_copies(training: Training, num_copies: int, make_setup: MakeSetup = single_device_setup) -> EnsembleTrace:
    """Train copies of the model on one device: one unchanged, then `num_copies` with inputs changed in the last bit.

    All copies run at once if `make_setup` is the default and the optimizer is elementwise. Otherwise they run one after the
    other.
    """
    parameters, steps = perturbed_material(training, num_copies, eps_of(training.precision.value))
    if training.optimizer.elementwise and make_setup is single_device_setup:
        return train_ensemble(training, parameters, steps)
    return train_copies(training, parameters, steps, make_setup)


def perturbed_material(
    training: Training, num_copies: int, eps: float
) -> tuple[dict[str, torch.Tensor], tuple[tuple[Batch, ...], ...]]:
    """Return initial parameters and batches for several copies, stacked along dim 0: one unchanged, then `num_copies` perturbed.

    Each value is changed by at most the relative distance `eps`.
    """
    generator = np.random.default_rng((training.seed, num_copies))

    def perturb(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values.expand(1 + num_copies, *values.shape)
        numbers = values.numpy()
        factors = 1.0 + eps * generator.uniform(-1.0, 1.0, (1 + num_copies, *numbers.shape))
        factors[0] = 1.0
        return torch.from_numpy(numbers * factors.astype(numbers.dtype))

    original = material(training)
    parameters = {name: perturb(values) for name, values in original.parameters.items()}
    steps = tuple(
        tuple(replace(batch, inputs=perturb(batch.inputs), targets=perturb(batch.targets)) for batch in step)
        for step in original.steps
    )
    return parameters, steps


def eps_of(kind: str) -> float:
    """Return the machine epsilon for an element type such as ``float32``: the distance between 1 and the next number."""
    return float(torch.finfo(getattr(torch, kind)).eps)


def expected_moments(
    training: Training, reference: Trace, copies: EnsembleTrace, *others: Trace, eps: float | None = None
) -> tuple[Expected, ...]:
    """Return the reference's values with tolerances, measured from perturbed copies of the training.

    `others` are runs of the same training with other summation orders. Their differences raise the tolerances, too. `eps` is the
    rounding unit, by default from the training's precision.
    """
    eps = eps_of(training.precision.value) if eps is None else eps
    return expected_of(reference, copies.moments(), eps, *others)


def expected_of(
    reference: Trace | ValueTrace, moved: Iterable[Copies | None], eps: float | None, *others: Trace
) -> tuple[Expected, ...]:
    """Return the reference's values with tolerances, measured from perturbed runs.

    Each item of `moved` holds all copies' values at one point in the run, with one row per copy. The first copy is unchanged. An
    item is None if no noise is measured at this point. `others` are runs with other summation orders. `eps` is the rounding unit.
    If it is None, each tensor's element type sets it, with 0 for integers and booleans.
    """
    tables: dict[int, Table] = {}
    found = []
    again: Iterable[tuple[Moment, ...]] = zip(*map(moments, others), strict=True) if others else repeat(())
    for moment, copies, same in zip(moments(reference), moved, again, strict=bool(others)):
        snapshot = moment.snapshot
        if id(snapshot.pieces) not in tables:
            tables[id(snapshot.pieces)] = table_of(snapshot.pieces)
        table = tables[id(snapshot.pieces)]
        values = full_vector(table, snapshot.present, snapshot.values)
        own = norms(table, values)
        scales = scales_of(moment.phase, table, own)
        spread, shifts = _noise(table, snapshot.present, values, copies, same)
        unit: float | Vector | None = eps
        if unit is None:
            unit = np.array([eps_of(kind) if kind.startswith("float") else 0.0 for kind in snapshot.dtypes])
            # Integers can be huge, for example the bits of numbers, and must not loosen the tolerances of numbers.
            scales = np.where(unit > 0.0, np.nanmax(own[unit > 0.0], initial=0.0), scales)
        found.append(
            Expected(
                step=moment.step,
                phase=moment.phase,
                table=table,
                present=snapshot.present,
                dtypes=snapshot.dtypes,
                values=values,
                norms=own,
                tolerances=FACTOR * np.maximum(spread, unit * own) + ABSOLUTE * unit * scales,
                scales=scales,
                shifts=shifts,
            )
        )
    return tuple(found)


def _noise(
    table: Table, present: tuple[bool, ...], values: Vector, moved: Copies | None, again: tuple[Moment, ...]
) -> tuple[Vector, Vector]:
    """Return spread and shift of each tensor."""
    if moved is None:
        return np.zeros(len(table.names)), np.zeros(len(table.names))
    first = full_vector(table, present, np.asarray(moved[0]))
    with np.errstate(invalid="ignore", over="ignore"):
        distances = [norms(table, full_vector(table, present, rows) - first) for rows in _blocks(moved[1:])]
        spread, shift = np.concatenate(distances).max(axis=0), norms(table, first - values)
        summed = [norms(table, full_vector(table, present, other.snapshot.values) - values) for other in again]
    return np.maximum.reduce([spread, *([shift, *summed] if again else ())]), shift


def _blocks(copies: Copies) -> Iterator[Numbers]:
    """Yield copies in blocks, because temporary arrays with all copies would take gigabytes."""
    rows = max(1, BLOCK // max(1, len(copies[0])))
    for start in range(0, len(copies), rows):
        block = copies[start : start + rows]
        yield block if isinstance(block, np.ndarray) else np.stack(block)


def scales_of(phase: Phase, table: Table, own: Vector) -> Vector:
    """Return for each tensor the largest norm among tensors of the same kind, such as all gradients.

    `own` contains the tensors' norms. In optimizer state, tensors with the same key are one kind, such as all ``exp_avg``. Each
    value that the training reports is a kind by itself.
    """
    if not len(own):
        return own
    if phase not in (Phase.STATE, Phase.REPORTED):
        return np.full(len(own), np.nanmax(own, initial=0.0))
    keys = np.array([name.rpartition("/")[2] for name in table.names])
    scales = np.empty(len(own))
    for key in set(keys.tolist()):
        scales[keys == key] = np.nanmax(own[keys == key], initial=0.0)
    return scales
