"""Positions on this rank, for modules with position numbers or attention."""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionHooks(Protocol):
    """Protocol of an attention module, as `Sequence` uses it. All tensors are (rows, heads, positions, head_dim)."""

    def repeat_kv_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat key or value heads so that each query head has its own copy."""

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return a mask, (queries, keys), with True if a query position may not attend to a key position; None masks nothing."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention over a full sequence."""

    def attend_from(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute attention from queries at some positions to keys at other positions."""


class Sequence:
    """Positions of a sequence, all on this rank. Context parallelism uses a subclass instead."""

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the positions in the full sequence of the `count` local positions, shape (count,)."""
        return torch.arange(count, device=device)

    def attend_from_local(
        self, looks: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention from the local positions to the full sequence.

        All tensors are (rows, heads, local positions, head_dim).
        """
        return looks.attend(query, looks.repeat_kv_heads(key), looks.repeat_kv_heads(value))


FULL_SEQUENCE = Sequence()
"""Sequence of every module without context parallelism."""
