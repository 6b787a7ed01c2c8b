"""Finds each context-parallel rank's positions, for a training on one device with all positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from equivcheck.diagnosis.catalogue.counterfactual import all_then_each
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.scenario import Attention, ContextParallel
from equivcheck.scenario.mesh import CP


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceShards:
    """The positions in a sequence on each context-parallel rank."""

    parts: tuple[torch.Tensor, ...]
    """Each rank's positions, in the order in which the rank computes them."""
    where: str
    """Phrase for the ranks, to use in a sentence."""

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.parts)

    @property
    def owner(self) -> torch.Tensor:
        """The rank of each position. The tensor has shape (length,)."""
        return self._laid([torch.full_like(part, rank) for rank, part in enumerate(self.parts)])

    @property
    def local(self) -> torch.Tensor:
        """The index of each position within its rank's shard. The tensor has shape (length,)."""
        return self._laid([torch.arange(len(part)) for part in self.parts])

    @property
    def place(self) -> torch.Tensor:
        """The index of each position in the concatenation of all shards, in rank order. The tensor has shape (length,)."""
        return self._laid([torch.arange(sum(map(len, self.parts)))])

    def _laid(self, values: list[torch.Tensor]) -> torch.Tensor:
        order = torch.cat(self.parts)
        found = torch.empty_like(order)
        found[order] = torch.cat(values)
        return found


def sequence_shards(diverged: DivergedRun) -> SequenceShards | None:
    """Return each context-parallel rank's positions.

    Returns None if the layout has only one such rank, or rounds to a lower-precision dtype.
    """
    found, size, length = diverged.layout.of(ContextParallel), diverged.mesh.size(CP), diverged.training.model.length
    if not found or size == 1 or length is None or diverged.rounding is not None:
        return None
    parts = tuple(torch.tensor(part, dtype=torch.int64) for part in positions_of_ranks(found[0], length, size))
    return SequenceShards(parts=parts, where=diverged.ranks_text((CP,)))


def attention_layers(diverged: DivergedRun, **having: bool) -> Iterator[tuple[int, ...]]:
    """Yield indices of attention layers whose fields have the values in `having`: first all of them, then each alone."""
    return all_then_each(
        [
            index
            for index, layer in enumerate(diverged.training.model.layers)
            if isinstance(layer, Attention) and all(getattr(layer, name) == value for name, value in having.items())
        ]
    )
