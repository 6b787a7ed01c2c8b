"""Sequences of which this rank has some positions: how they look at those of other ranks."""

from __future__ import annotations

import torch

from equivcheck.layers.sequence import Looks, Sequence
from equivcheck.parallelisms.context_parallel.ranks import Gather, PositionRanks


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
