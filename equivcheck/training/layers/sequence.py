"""The positions of a sequence on this rank, for position embeddings and attention."""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionHooks(Protocol):
    """Methods that `Sequence` calls on an attention module. All tensors have the shape (rows, heads, positions, head_dim)."""

    def repeat_kv_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat key or value heads so that each query head has its own copy."""

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return a mask that is True if a query position may not attend to a key position. None masks nothing.

        Its shape is (queries, keys).
        """

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention over a full sequence."""

    def attend_from(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute attention from queries at some positions to keys at other positions."""


class Sequence:
    """Positions of a sequence on this rank, and attention over them.

    This base class is for ranks that have all positions. Context parallelism uses a subclass.
    """

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the indices of this rank's `count` positions in the full sequence. The shape is (count,)."""
        return torch.arange(count, device=device)

    def attend_from_local(
        self, attention: AttentionHooks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention from this rank's positions to the full sequence, with the masks and heads of the module `attention`.

        All tensors have the shape (rows, heads, local positions, head_dim).
        """
        return attention.attend(query, attention.repeat_kv_heads(key), attention.repeat_kv_heads(value))


FULL_SEQUENCE = Sequence()
"""Sequence of every module without context parallelism."""
