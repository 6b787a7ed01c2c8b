"""Context-parallel shards of a sequence, for one device with all positions."""

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
    """Positions on each context-parallel rank."""

    parts: tuple[torch.Tensor, ...]
    """Positions per rank, in the rank's order."""
    where: str
    """Words for the ranks in a sentence."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def owner(self) -> torch.Tensor:
        """Rank of each position, (length,)."""
        return self._laid([torch.full_like(part, rank) for rank, part in enumerate(self.parts)])

    @property
    def local(self) -> torch.Tensor:
        """Index of each position within its rank's shard, (length,)."""
        return self._laid([torch.arange(len(part)) for part in self.parts])

    @property
    def place(self) -> torch.Tensor:
        """Index of each position if the shards are concatenated in rank order, (length,)."""
        return self._laid([torch.arange(sum(map(len, self.parts)))])

    def _laid(self, values: list[torch.Tensor]) -> torch.Tensor:
        order = torch.cat(self.parts)
        found = torch.empty_like(order)
        found[order] = torch.cat(values)
        return found


def sequence_shards(diverged: DivergedRun) -> SequenceShards | None:
    """Return the layout's context-parallel shards.

    None if the layout has one context-parallel rank, or rounds to another type.
    """
    found, size, length = diverged.layout.of(ContextParallel), diverged.mesh.size(CP), diverged.training.model.length
    if not found or size == 1 or length is None or diverged.rounding is not None:
        return None
    parts = tuple(torch.tensor(part, dtype=torch.int64) for part in positions_of_ranks(found[0], length, size))
    return SequenceShards(parts=parts, where=diverged.ranks_text((CP,)))


def attention_layers(diverged: DivergedRun, **having: bool) -> Iterator[tuple[int, ...]]:
    """Yield the attention layers with the given field values: all of them, then each single layer."""
    return all_then_each(
        [
            index
            for index, layer in enumerate(diverged.training.model.layers)
            if isinstance(layer, Attention) and all(getattr(layer, name) == value for name, value in having.items())
        ]
    )
