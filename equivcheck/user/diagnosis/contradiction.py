"""Ends an emulation as soon as its values clearly differ from those of the real ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from equivcheck.errors import EquivCheckError
from equivcheck.oracle.reference.noise import ABSOLUTE, FACTOR, Expected
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import TensorsByName, select_piece, values_by_piece
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot

SLACK = 1000.0
"""Factor for tolerances. Only clear differences end an emulation; the comparison of complete traces decides about the rest."""
NEARLY = 1e-3
"""Relative distance from a multiple of the right gradient, below which a gradient may be a multiple."""


class Contradicted(EquivCheckError):
    """Emulated values clearly differ from those on the real ranks, so the emulated mistake is not the cause."""


class RealValues:
    """Gradients and parameters of the real ranks."""

    def __init__(self, diverged: DivergedTraining, phases: Collection[Phase]) -> None:
        self._eps, self._first = diverged.eps, diverged.first.tensor
        pairs = zip(diverged.reference.moments, diverged.found, strict=True)
        self._moments = {
            (expected.step, expected.phase): (expected, found) for expected, found in pairs if expected.phase in phases
        }

    def require(self, step: int, phase: Phase, rank: int, emulated: Mapping[str, torch.Tensor]) -> None:
        """Raise `Contradicted` if any emulated tensor of a rank clearly differs from the real one."""
        if (step, phase) not in self._moments:
            return
        expected, found = self._moments[step, phase]
        held = values_by_piece(found[rank].snapshot)
        pieces = [(piece, real) for piece, real in held if real is not None and _fits(piece, emulated)]
        for piece, real in sorted(pieces, key=lambda each: each[0].name != self._first):
            other = select_piece(emulated[piece.name].detach().double().numpy(), piece)
            with np.errstate(invalid="ignore", over="ignore"):
                is_far = np.linalg.norm(real - other) > SLACK * self._limit(expected, piece.name, real, other)
            if is_far:  # false for NaN, which the complete comparison judges
                raise Contradicted(
                    f"step {step}, {phase.value} of {piece.name} on rank {rank}: the emulated values differ from the real ones"
                )

    def _limit(self, expected: Expected, name: str, real: Vector, other: Vector) -> float:
        """Return a bound that is at least the tolerance in the complete comparison of these values."""
        row = expected.table.rows.get(name)
        own, tolerance = (0.0, 0.0) if row is None else (float(expected.norms[row]), float(expected.tolerances[row]))
        size = max(own, float(np.linalg.norm(real)), float(np.linalg.norm(other)))
        largest = max(size, float(np.nanmax(expected.norms, initial=0.0)))
        rounding = FACTOR * self._eps * size + ABSOLUTE * self._eps * largest
        return max(rounding, tolerance * max(1.0, size / own if own else 1.0))


def are_gradients_scaled(diverged: DivergedTraining) -> bool:
    """Whether a wrong factor may explain the gradients at the first wrong step.

    False if a gradient on any rank is clearly not a multiple of the right gradient.
    """
    step = diverged.first.step
    right = diverged.expected_values(step, Phase.GRADIENT)
    for expected, found in zip(diverged.reference.moments, diverged.found, strict=True):
        if (expected.step, expected.phase) == (step, Phase.GRADIENT):
            return all(_are_multiples(expected, moment.snapshot, right) for moment in found)
    return True


def _are_multiples(expected: Expected, snapshot: Snapshot, right: TensorsByName) -> bool:
    """Whether each tensor may be a multiple of the right gradient.

    Factors may differ, because a step may clip tensors separately.
    """
    for piece, real in values_by_piece(snapshot):
        if real is not None and piece.name in right and right[piece.name].shape == piece.shape:
            own, tolerance = select_piece(right[piece.name], piece), expected.tolerances[expected.table.rows[piece.name]]
            size = float(own @ own)
            factor = float(real @ own) / size if size else 0.0
            if np.linalg.norm(real - factor * own) > NEARLY * np.linalg.norm(real) + SLACK * max(1.0, abs(factor)) * tolerance:
                return False
    return True


def _fits(piece: Piece, emulated: Mapping[str, torch.Tensor]) -> bool:
    return bool(piece.numel) and piece.name in emulated and tuple(emulated[piece.name].shape) == piece.shape
