"""Values on the ranks and in the single-device run, in which patterns and mistakes are searched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import isclose, prod

import numpy as np

from equivcheck.oracle.reference.reference import Reference
from equivcheck.training.update.settings import Settings
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.moments import Moment
from equivcheck.worlds.trace.pieces import TensorsByName, assemble_tensors
from equivcheck.worlds.trace.trace import Snapshot, Trace

RATIO = 1e-4
"""Relative tolerance for the ratio of found to expected values. All elements must have the same ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinate:
    """A rank with its coordinates in the mesh."""

    rank: int
    """Global rank."""
    indices: dict[str, int]
    """Index along each axis."""

    def agrees(self, other: RankCoordinate, axes: Iterable[str]) -> bool:
        """Whether both ranks have the same index along each of these axes."""
        return all(self.indices[name] == other.indices[name] for name in axes)

    def differs_only_along(self, other: RankCoordinate, axes: Sequence[str]) -> bool:
        """Whether both ranks have the same index along each axis, except for these axes."""
        return self.agrees(other, [name for name in self.indices if name not in axes])


def peers_of(coordinates: Sequence[RankCoordinate], rank: int, axes: Sequence[str]) -> list[int]:
    """Return the ranks that differ from `rank` only along some axes, with `rank` itself."""
    own = coordinates[rank]
    return [other.rank for other in coordinates if other.differs_only_along(own, axes)]


def axis_combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all combinations of one or more axes, largest first."""
    return [chosen for count in range(len(axes), 0, -1) for chosen in combinations(axes, count)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ComparedRanks:
    """Traces of all ranks, compared with the single-device run."""

    reference: Reference
    """Values of the single-device run, with tolerances."""
    traces: tuple[Trace, ...]
    """Each rank's trace."""
    found: tuple[tuple[Moment, ...], ...]
    """Each rank's values, for each compared point of the reference."""
    divergences: tuple[Divergence, ...]
    """All differences between ranks and reference, in order; at least one."""
    eps: float
    """Machine epsilon of the training's precision, or of its coarsest element type."""

    @property
    def first(self) -> Divergence:
        """The first divergence."""
        return self.divergences[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evidence(ComparedRanks, ABC):
    """Ranks that differ from the single-device run, with facts about the training."""

    axis_sizes: Mapping[str, int]
    """Number of ranks along each mesh axis, outermost axis first."""
    data_axes: tuple[str, ...]
    """Mesh axes with more than one rank, whose ranks compute on different rows."""
    num_steps: int
    """Number of training steps."""
    microbatch_rows: tuple[int, ...]
    """Number of rows in each microbatch of the first step."""
    has_schedule: bool
    """Whether the training has a learning-rate schedule."""
    initial: tuple[Snapshot, ...]
    """Each rank's parameters before training, and perhaps buffers. Empty if they are unknown."""
    settings: tuple[Settings, ...]
    """Each rank's optimizer settings after the last step, by parameter. Empty if they are unknown."""

    @property
    @abstractmethod
    def has_own_rows(self) -> bool:
        """Whether ranks have different rows, and one device can emulate each rank."""

    @property
    @abstractmethod
    def right_settings(self) -> Settings:
        """The single-device run's optimizer settings after the last step, by parameter."""

    @property
    @abstractmethod
    def right_settings_at_steps(self) -> tuple[Settings, ...]:
        """The single-device run's optimizer settings at each update."""

    @property
    @abstractmethod
    def settings_at_steps(self) -> tuple[tuple[Settings, ...], ...]:
        """Each rank's optimizer settings at each update. Empty if they are unknown."""

    @property
    @abstractmethod
    def right_initial_values(self) -> TensorsByName:
        """Tensors at the start of the single-device run."""

    @property
    def updates(self) -> tuple[Collection[str], ...]:
        """Parameters updated by each rank, by name. Empty if only optimizer state shows them, or if they are unknown."""
        return ()

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in the first step."""
        return len(self.microbatch_rows)

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has state."""
        return any(moment.phase is Phase.STATE and moment.table.names for moment in self.reference.moments)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return prod(self.axis_sizes.values())

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one rank."""
        return tuple(name for name, size in self.axis_sizes.items() if size > 1)

    @property
    def same_row_axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one rank, whose ranks compute on the same rows."""
        return tuple(name for name in self.wide_axes if name not in self.data_axes)

    @property
    def coordinates(self) -> tuple[RankCoordinate, ...]:
        """Each rank's coordinates in the mesh, in rank order."""
        places = product(*(range(size) for size in self.axis_sizes.values()))
        return tuple(
            RankCoordinate(rank=rank, indices=dict(zip(self.axis_sizes, place, strict=True))) for rank, place in enumerate(places)
        )

    @property
    def counts(self) -> dict[int, str]:
        """Numbers that may be a wrong factor in a divergence, such as axis sizes.

        Each has a phrase that follows ``the number of``. If several numbers are equal, such as axis size and microbatches, one
        phrase names them all.
        """
        ranks = [(self.size(axes), self.ranks_kind(axes)) for axes in sorted(axis_combinations(self.wide_axes), key=len)]
        counts: dict[int, list[str]] = {}
        for number, words in (*ranks, *self.call_counts(1)):
            counts.setdefault(number, []).append(words)
        return {number: " or of ".join(words) for number, words in counts.items()}

    def call_counts(self, known: int) -> list[tuple[int, str]]:
        """Return the number of microbatches in a step, and a phrase that follows ``the number of``, as a list with one pair.

        The list is empty if the number is 1 or equals `known`, a number that already has a phrase.
        """
        count = self.num_microbatches
        return [] if count in (1, known) else [(count, "microbatches")]

    @property
    def fractions(self) -> dict[float, str]:
        """Quotients that may be a wrong factor in a divergence, each with a phrase for it. Empty unless a subclass knows some."""
        return {}

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along these axes together."""
        return prod(size for name, size in self.axis_sizes.items() if name in axes)

    def ranks_text(self, axes: Sequence[str]) -> str:
        """Return a phrase for the ranks along these axes, such as ``the 2 dp ranks`` or ``the 2 x 4 dp x tp ranks``."""
        sizes = [str(size) for name, size in self.axis_sizes.items() if name in axes]
        return f"the {' x '.join(sizes)} {self.ranks_kind(axes)}"

    def ranks_kind(self, axes: Sequence[str]) -> str:
        """Return a phrase for the kind of ranks along these axes, such as ``dp ranks`` or ``dp x tp ranks``."""
        return f"{' x '.join(name for name in self.axis_sizes if name in axes)} ranks"

    @property
    def num_moments(self) -> int:
        """Number of compared points up to the end of the first step that differs. A point is one phase in one step.

        Optimizer state and buffers, compared at the end of the training, are counted only if the first divergence is in them.
        """
        first, at_end = self.first, (Phase.STATE, Phase.BUFFER)
        return 1 + max(
            at
            for at, moment in enumerate(self.reference.moments)
            if moment.step <= first.step and (moment.phase is first.phase or moment.phase not in at_end)
        )

    @property
    def updated(self) -> tuple[str, ...]:
        """Names of parameters that have a gradient in any step of the single-device run."""
        found = [moment for moment in self.reference.moments if moment.phase is Phase.GRADIENT]
        return tuple(name for at, name in enumerate(found[0].table.names) if any(moment.present[at] for moment in found))

    def differing(self, phase: Phase) -> tuple[str, ...]:
        """Names of the tensors that differ in a phase (such as gradients) of the first wrong step, in order."""
        return tuple(
            dict.fromkeys(found.tensor for found in self.divergences if (found.step, found.phase) == (self.first.step, phase))
        )

    def expected_values(self, step: int, phase: Phase) -> TensorsByName:
        """Return the single-device run's tensors at a step and phase, by name."""
        values: TensorsByName = {}
        for found in self.reference.moments:
            if (found.step, found.phase) == (step, phase) and found.table.names:
                ends = [*found.table.offsets[1:], found.table.total]
                rows = zip(found.table.names, found.table.shapes, found.table.offsets, ends, strict=True)
                values |= {name: found.values[start:end].reshape(shape) for name, shape, start, end in rows}
        return values

    def found_values(self, step: int, phase: Phase) -> TensorsByName:
        """Return the ranks' tensors at a step and phase, by name. If ranks disagree, the lowest rank's values count."""
        values: TensorsByName = {}
        for expected, found in zip(self.reference.moments, self.found, strict=True):
            if (expected.step, expected.phase) == (step, phase):
                values |= assemble_tensors([moment.snapshot for moment in found])
        return values

    def ratio(self, names: Sequence[str], phase: Phase) -> float | None:
        """Return the ratio of the ranks' values to the expected values, if all elements in the tensors `names` share it.

        Returns None if they do not, or if the ratio is 1. A ratio close to n or 1/n, for a whole number n, is rounded to it. A
        single element is no evidence for any other ratio, so None is returned.
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
