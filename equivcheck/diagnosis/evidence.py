"""Values left by ranks next to the reference's, for patterns and counterfactuals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np

from equivcheck.oracle.reference.reference import Reference
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import Moment
from equivcheck.worlds.trace.pieces import TensorsByName, fill, values_by_piece
from equivcheck.worlds.trace.trace import Trace

RATIO = 1e-4
"""Relative tolerance for the ratio of found to expected values. All elements must have the same ratio."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evidence(ABC):
    """Traces of ranks that diverged from a reference."""

    reference: Reference
    """The single-device run."""
    traces: tuple[Trace, ...]
    """Traces of the layout's ranks."""
    found: tuple[tuple[Moment, ...], ...]
    """The ranks' moments, for each reference moment."""
    divergences: tuple[Divergence, ...]
    """All divergences by value, in order; at least one."""

    @property
    @abstractmethod
    def eps(self) -> float:
        """Machine epsilon of the training's precision."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[int, str]:
        """Numbers that may explain a factor, each with its description."""

    @property
    def first(self) -> Divergence:
        """The first divergence."""
        return self.divergences[0]

    @property
    def num_moments(self) -> int:
        """Number of moments until the first diverged step ends."""
        last = len(self.reference.moments)
        return next((at for at, moment in enumerate(self.reference.moments) if self._is_later(moment.step, moment.phase)), last)

    def _is_later(self, step: int, phase: Phase) -> bool:
        return step > self.first.step or phase in (Phase.STATE, Phase.BUFFER)

    @property
    def updated(self) -> tuple[str, ...]:
        """Parameters with a gradient in some reference step."""
        found = [moment for moment in self.reference.moments if moment.phase is Phase.GRADIENT]
        return tuple(name for at, name in enumerate(found[0].table.names) if any(moment.present[at] for moment in found))

    @property
    def suspects(self) -> tuple[tuple[str, ...], ...]:
        """Candidate sets of parameters with wrong gradients: those that differ first, then all."""
        differing = tuple(name for name in self.differing(Phase.GRADIENT) if name in self.updated)
        is_part = bool(differing) and set(differing) != set(self.updated)
        return (differing, self.updated) if is_part else (differing or self.updated,)

    def differing(self, phase: Phase) -> tuple[str, ...]:
        """Tensors diverged in `phase` of the first diverged step, in order."""
        return tuple(
            dict.fromkeys(found.tensor for found in self.divergences if (found.step, found.phase) == (self.first.step, phase))
        )

    def expected_values(self, step: int, phase: Phase) -> TensorsByName:
        """The reference's tensors at a step and phase."""
        values: TensorsByName = {}
        for found in self.reference.moments:
            if (found.step, found.phase) == (step, phase):
                ends = [*found.table.offsets[1:], found.table.total]
                rows = zip(found.table.names, found.table.shapes, found.table.offsets, ends, strict=True)
                values |= {name: found.values[start:end].reshape(shape) for name, shape, start, end in rows}
        return values

    def found_values(self, step: int, phase: Phase) -> TensorsByName:
        """The ranks' tensors at a step and phase. If ranks disagree, the lowest rank's values are used."""
        values: TensorsByName = {}
        for expected, found in zip(self.reference.moments, self.found, strict=True):
            if (expected.step, expected.phase) == (step, phase):
                for moment in reversed(found):
                    for piece, held in values_by_piece(moment.snapshot):
                        if piece.name and held is not None:
                            fill(values.setdefault(piece.name, np.full(piece.shape, np.nan)), piece, held)
        return values

    def ratio(self, names: Sequence[str], phase: Phase) -> float | None:
        """One ratio between found and expected values for all elements; None if there is no such ratio or it is 1.

        A ratio close to n or 1/n is rounded to it. A single element always has a ratio, so it counts only if it is n or 1/n.
        """
        found, expected = self.found_values(self.first.step, phase), self.expected_values(self.first.step, phase)
        ratios = [
            (found[name][expected[name] != 0.0] / expected[name][expected[name] != 0.0]).reshape(-1)
            for name in names
            if name in found and name in expected and found[name].shape == expected[name].shape
        ]
        values = np.concatenate(ratios) if ratios else np.empty(0)
        if not len(values) or not np.isfinite(values).all() or not values.all():
            return None
        ratio = float(np.median(values))
        if not np.allclose(values, ratio, rtol=RATIO) or isclose(ratio, 1.0, rel_tol=RATIO):
            return None
        for whole in (round(ratio), 1 / round(1 / ratio) if abs(ratio) < 1 else 0.0):
            if whole and isclose(whole, ratio, rel_tol=RATIO):
                return float(whole)
        return ratio if len(values) > 1 else None
