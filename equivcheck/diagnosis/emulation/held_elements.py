"""Which elements of each tensor a rank holds, and from whom it has the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.coordinates import RankCoordinate, coordinates_of_ranks
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.scenario import DDP
from equivcheck.worlds.trace.pieces import fill


@lru_cache(maxsize=4)
def held_elements_of(diverged: DivergedRun) -> HeldElements:
    """Those of a run, worked out once."""
    return HeldElements(coordinates_of_ranks(diverged.mesh), held_of(diverged), _owners(diverged))


class HeldElements:
    """What each rank holds of each parameter; puts whole tensors together on every rank."""

    def __init__(
        self, coordinates: Sequence[RankCoordinate], held: Mapping[str, list[np.ndarray]], owners: Mapping[str, int]
    ) -> None:
        """`held` has masks by rank; `owners` are ranks that update a tensor for all, if they do."""
        self._coordinates, self._held, self._owners = coordinates, held, owners
        self._sources = {name: self._sources_of(holders) for name, holders in self._held.items()}

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self._coordinates)

    @property
    def is_sharded(self) -> bool:
        """Whether any rank lacks any element."""
        return any(sources is not None for sources in self._sources.values())

    def by(self, name: str, *ranks: int) -> torch.Tensor:
        """Which elements of a tensor some ranks hold together, as a tensor of its shape."""
        return torch.from_numpy(np.asarray(np.any([self._held[name][rank] for rank in ranks], axis=0)))

    def num_copies(self, axes: Sequence[str]) -> dict[str, torch.Tensor]:
        """Of each tensor, by how many ranks that differ along some axes only each element is held, at most."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for one in self._coordinates:
            lines.setdefault(tuple(index for axis, index in one.indices.items() if axis not in axes), []).append(one.rank)
        counts = {
            name: [np.sum([held[rank] for rank in line], axis=0) for line in lines.values()] for name, held in self._held.items()
        }
        return {name: torch.from_numpy(np.asarray(np.max(each, axis=0))) for name, each in counts.items()}

    def exchange(self, name: str, value: torch.Tensor, sources: Sequence[int]) -> None:
        """Give each rank's elements of a tensor, in place, those of another rank, where both hold as many."""
        before = value.clone()
        for rank, source in enumerate(sources):
            mine, theirs = self.by(name, rank), self.by(name, source)
            if int(mine.sum()) == int(theirs.sum()):
                value[mine] = before[theirs]

    def shifted(self) -> Iterator[tuple[int, list[int]]]:
        """For each distance, the ranks so far after each rank."""
        for distance in range(1, self.num_ranks):
            yield distance, [(rank + distance) % self.num_ranks for rank in range(self.num_ranks)]

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
        """The ranks from which a rank has what it does not hold, nearest first, each with the elements."""
        missing, found = ~holders[rank], []
        for other in sorted(range(len(holders)), key=lambda other: (self._num_axes_apart(rank, other), other)):
            chosen = missing & holders[other]
            if chosen.any():
                found.append((other, torch.from_numpy(np.asarray(chosen))))
                missing = missing & ~chosen
        return found

    def _num_axes_apart(self, rank: int, other: int) -> int:
        """Along how many axes two ranks differ."""
        mine, theirs = self._coordinates[rank], self._coordinates[other]
        return sum(not mine.agrees(theirs, (name,)) for name in mine.indices)


def held_of(diverged: Evidence) -> dict[str, list[np.ndarray]]:
    """Per parameter, which elements each rank holds."""
    table = diverged.reference.moments[1].table
    held = {
        name: [np.zeros(shape, dtype=np.bool_) for _ in diverged.traces]
        for name, shape in zip(table.names, table.shapes, strict=True)
    }
    for rank, trace in enumerate(diverged.traces):
        for piece in trace.steps[0].parameters.pieces:
            if piece.name in held and held[piece.name][rank].shape == piece.shape:
                fill(held[piece.name][rank], piece, np.ones(piece.numel, dtype=np.bool_))
    return held


def _owners(diverged: DivergedRun) -> dict[str, int]:
    """The rank that updates a parameter for all, where one does: the only one with state, though every rank holds all of it."""
    if not any(each.zero_redundancy for each in diverged.layout.of(DDP)):
        return {}
    found: dict[str, int] = {}
    for rank, trace in enumerate(diverged.traces):
        for piece in trace.state.pieces:
            found.setdefault(piece.name.rpartition("/")[0], rank)
    return found
