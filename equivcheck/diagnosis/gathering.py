"""Which elements a rank holds, and from whom it has the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.rank_coordinates import coordinates_of_ranks
from equivcheck.scenario import DDP
from equivcheck.trace.pieces import fill


@lru_cache(maxsize=4)
def gathering_of(case: Case) -> Gathering:
    """That of a case, made once."""
    return Gathering(case, [seat.coordinate for seat in coordinates_of_ranks(case.scenario.layout.mesh)])


class Gathering:
    """Puts whole tensors together on every rank, each element from a rank that holds it."""

    def __init__(self, case: Case, coordinates: Sequence[Mapping[str, int]]) -> None:
        self._coordinates = coordinates
        self._held = _held(case)
        self._owners = _owners(case)
        self._sources = {name: self._sources_of(holders) for name, holders in self._held.items()}

    def held(self, name: str, rank: int) -> torch.Tensor:
        """Which elements of a tensor a rank holds, as a tensor of its shape."""
        return torch.from_numpy(self._held[name][rank])

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors."""
        return tuple(self._held)

    def held_by_any(self, name: str, ranks: Sequence[int]) -> torch.Tensor:
        """Which elements of a tensor some ranks hold together."""
        return torch.from_numpy(np.any([self._held[name][rank] for rank in ranks], axis=0))

    def copies(self, name: str, axes: Sequence[str]) -> torch.Tensor:
        """By how many ranks that differ along some axes only each element is held, at most."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self._coordinates):
            lines.setdefault(tuple(index for axis, index in coordinate.items() if axis not in axes), []).append(rank)
        counts = [np.sum([self._held[name][rank] for rank in line], axis=0) for line in lines.values()]
        return torch.from_numpy(np.max(counts, axis=0))

    @property
    def is_sharded(self) -> bool:
        """Whether any rank lacks any element."""
        return any(sources is not None for sources in self._sources.values())

    def gather(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace, in place, what ranks do not hold by what a rank has that does."""
        for name, sources in self._sources.items():
            if sources is None or any(name not in each for each in tensors):
                continue
            before = [each[name].clone() for each in tensors]
            for rank, each in enumerate(tensors):
                for source, chosen in sources[rank]:
                    each[name][chosen] = before[source][chosen]

    def take_from_owners(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace, in place, what one rank alone updates by what that rank has."""
        for name, owner in self._owners.items():
            for each in tensors:
                each[name].copy_(tensors[owner][name])

    def _sources_of(self, holders: Sequence[np.ndarray]) -> list[list[tuple[int, torch.Tensor]]] | None:
        if all(held.all() for held in holders):
            return None
        return [self._sources_for(rank, holders) for rank in range(len(holders))]

    def _sources_for(self, rank: int, holders: Sequence[np.ndarray]) -> list[tuple[int, torch.Tensor]]:
        missing, found = ~holders[rank], []
        for other in sorted(range(len(holders)), key=lambda other: (self._apart(rank, other), other)):
            chosen = missing & holders[other]
            if chosen.any():
                found.append((other, torch.from_numpy(chosen)))
                missing = missing & ~chosen
        return found

    def _apart(self, rank: int, other: int) -> int:
        """Along how many axes two ranks differ."""
        mine, theirs = self._coordinates[rank], self._coordinates[other]
        return sum(mine[name] != theirs[name] for name in mine)


def _held(case: Case) -> dict[str, list[np.ndarray]]:
    """Per parameter, which elements each rank holds."""
    table = case.reference.moments[1].table
    held = {
        name: [np.zeros(shape, dtype=np.bool_) for _ in case.traces]
        for name, shape in zip(table.names, table.shapes, strict=True)
    }
    for rank, trace in enumerate(case.traces):
        for piece in trace.steps[0].parameters.pieces:
            if piece.name in held and held[piece.name][rank].shape == piece.shape:
                fill(held[piece.name][rank], piece, np.ones(piece.numel, dtype=np.bool_))
    return held


def _owners(case: Case) -> dict[str, int]:
    """The rank that updates a parameter for all, where one does: the only one with state, though every rank holds all of it."""
    if not any(each.zero_redundancy for each in case.scenario.layout.of(DDP)):
        return {}
    found: dict[str, int] = {}
    for rank, trace in enumerate(case.traces):
        for piece in trace.state.pieces:
            found.setdefault(piece.name.rpartition("/")[0], rank)
    return found
