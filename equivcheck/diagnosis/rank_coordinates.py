"""Where ranks sit in a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinate:
    """A rank's place in the mesh."""

    rank: int
    """Global rank."""
    coordinate: dict[str, int]
    """Its index along each axis."""


def coordinates_of_ranks(mesh: Mesh) -> tuple[RankCoordinate, ...]:
    """The seats of a mesh in rank order."""
    return tuple(
        RankCoordinate(rank=rank, coordinate=dict(zip(mesh.names, mesh.coordinate(rank), strict=True)))
        for rank in range(mesh.num_ranks)
    )
