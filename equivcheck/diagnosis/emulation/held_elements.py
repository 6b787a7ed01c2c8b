"""Says which elements each rank holds, and takes missing elements from other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from equivcheck.diagnosis.evidence import Evidence, RankCoordinate, peers_of
from equivcheck.worlds.trace.pieces import fill


@lru_cache(maxsize=4)
def held_elements(diverged: Evidence) -> HeldElements:
    """Find out which rank holds which elements of each parameter, and which replicated tensors only one rank updates."""
    held, owners = _held_masks(diverged), dict[str, list[int]]()
    for name, masks in held.items():
        # Ranks of other pipeline stages do not hold the tensor.
        if all(mask.all() or not mask.any() for mask in masks):
            owners[name] = [_owner_of(diverged, name, rank) for rank in range(diverged.num_ranks)]
    split_updates = {name: ranks for name, ranks in owners.items() if ranks != list(range(diverged.num_ranks))}
    return HeldElements(diverged.coordinates, held, split_updates)


def _owner_of(diverged: Evidence, name: str, rank: int) -> int:
    """Return the only rank updating a tensor, among `rank` and its data-parallel peers.

    Returns `rank` itself if several ranks update the tensor, or none.
    """
    updating = [peer for peer in peers_of(diverged.coordinates, rank, diverged.data_axes) if _updates(diverged, name, peer)]
    return updating[0] if len(updating) == 1 else rank


def _updates(diverged: Evidence, name: str, rank: int) -> bool:
    if diverged.updates:
        return name in diverged.updates[rank]
    return any(piece.name.rpartition("/")[0] == name for piece in diverged.traces[rank].state.pieces)


class HeldElements:
    """Says which elements of each parameter a rank holds, and gathers full tensors on emulated ranks."""

    def __init__(
        self, coordinates: Sequence[RankCoordinate], held: Mapping[str, list[np.ndarray]], owners: Mapping[str, Sequence[int]]
    ) -> None:
        """`held` maps parameters to one mask per rank.

        `owners` has parameters with split updates. It gives each rank another rank, whose update this rank takes.
        """
        self._coordinates, self._held, self._owners = coordinates, held, owners
        self._sources = {name: self._sources_of(holders) for name, holders in self._held.items()}

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._coordinates)

    @property
    def is_sharded(self) -> bool:
        """Whether some rank does not hold all elements."""
        return any(sources is not None for sources in self._sources.values())

    def by(self, name: str, *ranks: int) -> torch.Tensor:
        """Return a mask in the shape of the tensor `name`. It is True for elements on any of these ranks."""
        return torch.from_numpy(np.asarray(np.any([self._held[name][rank] for rank in ranks], axis=0)))

    def exchange(self, name: str, value: torch.Tensor, sources: Sequence[int]) -> None:
        """Overwrite each rank's elements in `value` by the elements of another rank, whose number is `sources[rank]`.

        A rank is skipped if the other rank does not hold equally many elements of the tensor `name`.
        """
        before = value.clone()
        for rank, source in enumerate(sources):
            mine, theirs = self.by(name, rank), self.by(name, source)
            if int(mine.sum()) == int(theirs.sum()):
                value[mine] = before[theirs]

    def take_unsplit(self, name: str, value: torch.Tensor, axes: Sequence[str]) -> None:
        """Overwrite each rank's elements in `value` by elements at a wrong offset, as if `axes` did not split tensors.

        The offset counts only the elements on earlier ranks along the other axes. Replicas read the same elements.
        """
        before = value.clone().reshape(-1)
        for rank, coordinate in enumerate(self._coordinates):
            mine = self.by(name, rank)
            peers = [each.rank for each in self._coordinates if each.agrees(coordinate, axes)]
            first_replica = next(peer for peer in peers if torch.equal(self.by(name, peer), mine))
            earlier = [peer for peer in peers if peer < first_replica]
            start, count = int(self.by(name, *earlier).sum()), int(mine.sum())
            if start + count <= value.numel():
                value[mine] = before[start : start + count]

    def are_split(self, name: str, axes: Sequence[str]) -> bool:
        """Whether the ranks along these axes hold different elements of the tensor `name`."""
        masks = [[self._held[name][peer] for peer in peers_of(self._coordinates, rank, axes)] for rank in range(self.num_ranks)]
        return any((mask != each[0]).any() for each in masks for mask in each)

    def are_other_elements(self, name: str, axes: Sequence[str]) -> bool:
        """Whether the ranks along these axes hold equally many, but different elements of the tensor `name`."""
        masks = [[self._held[name][peer] for peer in peers_of(self._coordinates, rank, axes)] for rank in range(self.num_ranks)]
        return self.are_split(name, axes) and all(len({int(mask.sum()) for mask in each}) == 1 for each in masks)

    def add_up_shards(self, name: str, value: torch.Tensor, axes: Sequence[str], divisor: int) -> None:
        """Overwrite each rank's elements in `value` by the sum of the shards along these axes, divided by `divisor`.

        A rank is skipped if the shards in its sum have unequal sizes.
        """
        before = value.clone()
        for rank in range(self.num_ranks):
            shards = [before[self.by(name, peer)] for peer in peers_of(self._coordinates, rank, axes)]
            if len({len(shard) for shard in shards}) == 1:
                value[self.by(name, rank)] = torch.stack(shards).sum(0) / divisor

    def sources_by_distance(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each distance d between ranks, with a list that maps rank r to rank r + d, modulo the number of ranks."""
        for distance in range(1, self.num_ranks):
            yield distance, [(rank + distance) % self.num_ranks for rank in range(self.num_ranks)]

    def gather(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy missing elements from other ranks, in place. `tensors` has each rank's tensors by name."""
        for name, sources in self._sources.items():
            if sources is None or any(name not in each for each in tensors):
                continue
            if all(torch.equal(each[name], tensors[0][name]) for each in tensors[1:]):
                continue  # selecting elements by masks takes much longer than comparing them
            before = [each[name].clone() for each in tensors]
            for rank, each in enumerate(tensors):
                for source, chosen in sources[rank]:
                    each[name][chosen] = before[source][chosen]

    def take_from_owners(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy tensors in place from the ranks updating them to the other ranks.

        `tensors` has each rank's tensors by name. Tensors updated by every rank stay unchanged.
        """
        for name, owners in self._owners.items():
            before = [each[name].clone() for each in tensors]
            for each, owner in zip(tensors, owners, strict=True):
                each[name].copy_(before[owner])

    def _sources_of(self, holders: Sequence[np.ndarray]) -> list[list[tuple[int, torch.Tensor]]] | None:
        if all(held.all() for held in holders):
            return None
        return [self._sources_for(rank, holders) for rank in range(len(holders))]

    def _sources_for(self, rank: int, holders: Sequence[np.ndarray]) -> list[tuple[int, torch.Tensor]]:
        """Return the nearest ranks holding the elements missing on `rank`, each with a mask."""
        missing, found = ~holders[rank], []
        for other in sorted(range(len(holders)), key=lambda other: (self._num_axes_apart(rank, other), other)):
            chosen = missing & holders[other]
            if chosen.any():
                found.append((other, torch.from_numpy(np.asarray(chosen))))
                missing = missing & ~chosen
        return found

    def _num_axes_apart(self, rank: int, other: int) -> int:
        mine, theirs = self._coordinates[rank], self._coordinates[other]
        return sum(not mine.agrees(theirs, (name,)) for name in mine.indices)


def _held_masks(diverged: Evidence) -> dict[str, list[np.ndarray]]:
    """Return masks for held elements, by parameter and rank."""
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
