"""Rank coordinates in the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinate:
    """A rank and its coordinate in the mesh."""

    rank: int
    """Global rank."""
    indices: dict[str, int]
    """Index along each axis."""

    def agrees(self, other: RankCoordinate, axes: Iterable[str]) -> bool:
        """Whether both ranks have equal indices along the given axes."""
        return all(self.indices[name] == other.indices[name] for name in axes)

    def differs_only_along(self, other: RankCoordinate, axes: Sequence[str]) -> bool:
        """Whether both ranks have equal indices along all axes except the given ones."""
        return self.agrees(other, [name for name in self.indices if name not in axes])


def axis_combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of at least one axis, largest first."""
    return [chosen for count in range(len(axes), 0, -1) for chosen in combinations(axes, count)]
