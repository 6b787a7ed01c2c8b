"""Module for self-attention."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from equivcheck.scenario import Attention
from equivcheck.scenario.layers.token_layers import ROTARY_BASE
from equivcheck.training.documents import in_other_documents, places_in_documents
from equivcheck.training.layers.module import LayerModule, UninitializedLinear, norm_of, replicated_like


class AttentionModule(LayerModule):
    """Grouped-query self-attention: each key and value head serves several consecutive query heads."""

    layer: Attention

    def __init__(self, layer: Attention, in_features: int) -> None:
        super().__init__(layer)
        wide, narrow = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.norm = norm_of(layer.norm, in_features)
        self.query = UninitializedLinear(in_features, wide, bias=layer.bias)
        self.key = UninitializedLinear(in_features, narrow, bias=layer.bias)
        self.value = UninitializedLinear(in_features, narrow, bias=layer.bias)
        self.output = UninitializedLinear(wide, in_features, bias=layer.bias)

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:  # noqa: ARG002 - of the base
        """Compute the layer. Input and output have shape (rows, length, features)."""
        layer = self.layer
        normed = inputs if self.norm is None else self.norm(inputs)
        query = _heads(self.query(normed), layer.head_dim)
        key, value = (_heads(linear(normed), layer.head_dim) for linear in (self.key, self.value))
        if layer.rotary:
            query, key = self.with_rotary(query), self.with_rotary(key)
        attended = self.sequence.attend_from_local(self, query, key, value)
        return self.finish(self.output(attended.transpose(-2, -3).flatten(-2)), mask, inputs)

    def with_rotary(self, values: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings at this rank's positions to query or key. Their shape is (rows, heads, length, head_dim)."""
        positions = self.sequence.positions(values.shape[-2], values.device)
        return rotate(values, places_in_documents(positions, self.document_length))

    def repeat_kv_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat key or value heads, so that each query head has its own copy. Their shape is (rows, heads, length, head_dim)."""
        groups = self.layer.num_heads // self.layer.num_kv_heads
        return values.repeat_interleave(groups, -3) if groups > 1 else values

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return a mask with True if a query may not attend to a key; None if each query attends to each key.

        Its shape is (queries, keys). Arguments are positions in the full sequence.
        """
        return self.hide_other_documents(keys > queries[:, None] if self.layer.causal else None, queries, keys)

    def hide_other_documents(self, unseen: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the mask `unseen` with keys in other documents masked too. Its shape is (queries, keys)."""
        if self.document_length is None:
            return unseen
        others = in_other_documents(queries, keys, self.document_length)
        return others if unseen is None else unseen | others

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention over a full sequence. All tensors have shape (rows, heads, length, head_dim)."""
        if self.document_length is not None:
            positions = torch.arange(query.shape[-2], device=query.device)
            return self.attend_from(query, key, value, self.unseen(positions, positions))
        if self.layer.fused:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=self.layer.causal)
        length = query.shape[-2]
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        return attention(query, key, value, ones.triu(1) if self.layer.causal else None)

    def attend_from(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute attention from queries at some positions to keys at other positions.

        Query, key and value have shape (rows, heads, positions, head_dim). `unseen` is a mask with True if a query may not attend
        to a key.
        """
        if self.layer.fused:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=None if unseen is None else ~unseen)
        return attention(query, key, value, unseen)


def _heads(values: torch.Tensor, width: int) -> torch.Tensor:
    """Map (rows, length, heads * head_dim) to (rows, heads, length, head_dim)."""
    parts: torch.Tensor = values.unflatten(-1, (values.shape[-1] // width, width))  # type: ignore[no-untyped-call]
    return parts.transpose(-2, -3)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` with matmuls and a softmax. Tensors have shape (rows, heads, length, head_dim).

    The mask `unseen` has shape (queries, keys), and True if a query may not attend to a key. None masks nothing.
    """
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if unseen is not None:
        scores = scores.masked_fill(replicated_like(scores, unseen), -torch.inf)
    return scores.softmax(-1) @ value


def rotate(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding: rotate features i and i + head_dim/2 by the token's position.

    `values` has shape (rows, heads, length, head_dim).
    """
    half = values.shape[-1] // 2
    rates = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=values.device) / half)
    angles = torch.outer(positions.to(torch.float64), rates).to(values.dtype)
    cosine, sine = replicated_like(values, angles.cos()), replicated_like(values, angles.sin())
    first, second = values[..., :half], values[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
