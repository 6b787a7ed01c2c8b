"""Sequences of which this rank has some positions: how they look at those of other ranks."""

from __future__ import annotations

import torch

from equivcheck.layouts.parallelisms.context_parallel.heads import ToHeads, ToPositions
from equivcheck.layouts.parallelisms.context_parallel.ranks import Gather, PositionRanks
from equivcheck.layouts.parallelisms.context_parallel.ring import Ring, RingAttention
from equivcheck.scenario import Exchange
from equivcheck.training.layers.sequence import Looks, Sequence


class PartOfSequence(Sequence):
    """The positions of one rank."""

    def __init__(self, ranks: PositionRanks) -> None:
        self.ranks = ranks

    def positions(self, count: int, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - of the base class
        """Those of this rank."""
        return self.ranks.own.to(device)


class Gathered(PartOfSequence):
    """Keys and values of all positions come to every rank."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Gather keys and values at once, and look at all from the positions that are here."""
        gathered: torch.Tensor = Gather.apply(torch.stack((key, value)), self.ranks)  # type: ignore[no-untyped-call]
        keys, values = gathered.unbind()
        unseen = looks.unseen(self.ranks.own, torch.arange(self.ranks.length))
        return looks.attend_from(query, looks.grouped(keys), looks.grouped(values), unseen)


class SharedHeads(PartOfSequence):
    """Each rank looks with some of the heads, at whole sequences."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Exchange queries, keys and values at once for those of whole sequences, and what is found there back."""
        units = key.shape[-3]
        parts = [by_units_of(query, units), key.unsqueeze(2), value.unsqueeze(2)]
        whole: torch.Tensor = ToHeads.apply(torch.cat(parts, 2), self.ranks)  # type: ignore[no-untyped-call]
        queries, keys, values = torch.split(whole, [parts[0].shape[2], 1, 1], 2)
        found = looks.attend(queries.flatten(1, 2), looks.grouped(keys.squeeze(2)), looks.grouped(values.squeeze(2)))
        grouped = found.view(queries.shape)
        back: torch.Tensor = ToPositions.apply(grouped, units, self.ranks)  # type: ignore[no-untyped-call]
        return back.flatten(1, 2)


def by_units_of(query: torch.Tensor, units: int) -> torch.Tensor:
    """Heads of the query that look through one of key and value, side by side."""
    found: torch.Tensor = query.unflatten(1, (units, query.shape[1] // max(units, 1)))  # type: ignore[no-untyped-call]
    return found


class RoundTrips(PartOfSequence):
    """Keys and values go round all ranks."""

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Look at those of each rank in turn."""
        ring = Ring(ranks=self.ranks, looks=looks)
        found: torch.Tensor = RingAttention.apply(query, torch.stack((key, value)), ring)  # type: ignore[no-untyped-call]
        return found


SEQUENCES: dict[Exchange, type[PartOfSequence]] = {
    Exchange.GATHER: Gathered,
    Exchange.ULYSSES: SharedHeads,
    Exchange.RING: RoundTrips,
}
