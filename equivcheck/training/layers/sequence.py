"""Which positions of each sequence are here: what modules ask that count positions, or look at others."""

from __future__ import annotations

from typing import Protocol

import torch


class Looks(Protocol):
    """A module whose positions look at others; all values are (rows, heads, positions, width)."""

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """Key or value for each head of the query, from heads that are each for several."""

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Which positions of keys each position of queries does not see, shape (queries, keys); None for seeing all."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What each head finds in a whole sequence."""

    def attend_from(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor | None
    ) -> torch.Tensor:
        """What each head finds from some positions in those of keys."""


class Sequence:
    """All positions of each sequence, in order; a parallelism that cuts them has a class of its own."""

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """Which positions of the whole sequence the `count` that are here are, shape (count,)."""
        return torch.arange(count, device=device)

    def attended(self, looks: Looks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What the positions that are here find in the whole sequence: all are (rows, heads, positions here, width)."""
        return looks.attend(query, looks.grouped(key), looks.grouped(value))


WHOLE = Sequence()
"""What every module starts with."""
