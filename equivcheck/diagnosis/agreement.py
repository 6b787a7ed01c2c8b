"""Compares the ranks' values with those of a training that makes a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equivcheck.diagnosis.evidence import ComparedRanks
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.noise import ABSOLUTE, FACTOR, Expected
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.moments import Moment, moments
from equivcheck.worlds.trace.pieces import TensorsByName, full_tensors_of, select_piece, values_by_piece
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Piece, Trace

OPTIONAL = (Phase.STATE, Phase.BUFFER)
"""Phases of a step that a trainer may leave out."""


def num_agreeing_moments(diverged: ComparedRanks, traces: Sequence[Trace]) -> int:
    """Count the points in training at which the ranks' values equal those in `traces`, up to the first difference.

    A point is one phase in one step, such as the gradients. `traces` come from a training with a mistake: one trace for each
    rank, or one for all ranks.
    """
    made = list(zip(*map(moments, traces), strict=True))
    count = 0
    for index, (expected, found, other) in enumerate(zip(diverged.reference.moments, diverged.found, made, strict=False)):
        if (expected.step, expected.phase) != (other[0].step, other[0].phase):
            break  # the counterfactual ran fewer steps
        # Emulated ranks may report values of their own rows, and trainers need not record state and buffers.
        is_compared = expected.phase is not Phase.REPORTED and (expected.phase not in OPTIONAL or _is_recorded(found))
        if is_compared and not (_agrees(diverged, expected, found, other) and _ranks_disagree_too(diverged, expected, other)):
            break
        count = index + 1
    return count


def _is_recorded(found: Sequence[Moment]) -> bool:
    return any(values is not None for moment in found for _, values in values_by_piece(moment.snapshot))


def differs_in_first_tensor(diverged: ComparedRanks, traces: Sequence[Trace]) -> bool:
    """Whether the ranks' first divergence also occurs in a training with a mistake: at the same step, phase and tensor.

    A mistake whose effect stays below the tolerance would otherwise count as the cause for a small divergence.
    """
    first = (diverged.first.step, diverged.first.phase, diverged.first.tensor)
    return any((each.step, each.phase, each.tensor) == first for each in compare(diverged.reference, traces).divergences)


def _agrees(diverged: ComparedRanks, expected: Expected, found: tuple[Moment, ...], made: tuple[Moment, ...]) -> bool:
    wholes = [full_tensors_of(moment.snapshot) for moment in made]
    if expected.phase is Phase.LOSS:
        return _losses_agree(diverged, expected, found, wholes)
    limits = _limits(diverged, expected, wholes)
    held: dict[str, int] = {}
    for rank, moment in enumerate(found):
        whole = wholes[rank % len(wholes)]
        if not all(moment.snapshot.fits[at] or not moment.snapshot.present[at] for at in range(len(moment.snapshot.fits))):
            return False
        for piece, values in values_by_piece(moment.snapshot):
            if not _piece_agrees(piece, values, whole, limits):
                return False
            held[piece.name] = held.get(piece.name, 0) + piece.numel
    return all(held.get(name, 0) >= values.size for name, values in wholes[0].items())


def _piece_agrees(piece: Piece, values: Vector | None, whole: TensorsByName, limits: dict[str, float]) -> bool:
    if not piece.name or not piece.numel:
        return True
    other = whole.get(piece.name)
    if other is None or values is None:
        return other is None and values is None
    if other.shape != piece.shape:
        return False
    return _distance(values, select_piece(other, piece)) <= limits[piece.name]


def _losses_agree(diverged: ComparedRanks, expected: Expected, found: tuple[Moment, ...], wholes: list[TensorsByName]) -> bool:
    held = [moment.snapshot.values for moment in found if moment.snapshot.present[0]]
    made = [whole["loss"] for whole in wholes if "loss" in whole]
    if not held or not made:
        return not held and not made
    limit = _limits(diverged, expected, wholes)["loss"]
    if _distance(np.mean(held, axis=0).reshape(-1), np.mean(made, axis=0).reshape(-1)) > limit:
        return False
    # Emulated ranks may compute on all rows, so that a group's losses are compared with each other only.
    for group in diverged.reference.loss_groups if len(wholes) > 1 else ():
        present = [rank for rank in group if found[rank].snapshot.present[0] and "loss" in wholes[rank]]
        apart = [float(found[rank].snapshot.values[0]) - float(wholes[rank]["loss"]) for rank in present]
        if apart and not max(apart) - min(apart) <= limit:
            return False
    return True


def _distance(values: Vector, other: Vector) -> float:
    same = (values == other) | (np.isnan(values) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.linalg.norm(np.where(same, 0.0, values - other))
    return math.inf if np.isnan(distance) else float(distance)


def _limits(diverged: ComparedRanks, expected: Expected, wholes: list[TensorsByName]) -> dict[str, float]:
    """Return the tolerance per tensor: the reference's, increased if the tensor is larger in the counterfactual."""
    eps = diverged.eps
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = [{name: float(np.linalg.norm(values)) for name, values in whole.items()} for whole in wholes]
    largest = np.nanmax([size for each in sizes for size in each.values()], initial=0.0)
    limits = {}
    for name in dict.fromkeys(name for each in sizes for name in each):
        size = max(each.get(name, 0.0) for each in sizes)
        row = expected.table.rows.get(name)
        limit = FACTOR * eps * size + ABSOLUTE * eps * float(largest)
        if row is not None:
            own = float(expected.norms[row])
            limit = max(limit, float(expected.tolerances[row]) * max(1.0, size / own if own else 1.0))
        limits[name] = limit
    return limits


def _ranks_disagree_too(diverged: ComparedRanks, expected: Expected, made: tuple[Moment, ...]) -> bool:
    """Whether the counterfactual's ranks disagree on each tensor on which the real ranks disagree."""
    names = {
        divergence.tensor
        for divergence in diverged.divergences
        if divergence.difference is Difference.RANKS_DISAGREE
        and (divergence.step, divergence.phase) == (expected.step, expected.phase)
    }
    if not names:
        return True
    wholes = [full_tensors_of(moment.snapshot) for moment in made]
    here = [name for name in names if any(name in whole for whole in wholes)]
    return all(any(not np.array_equal(whole[name], wholes[0][name]) for whole in wholes[1:]) for name in here)
