"""Modules for token models: embedding, attention, gated MLP, head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from equivcheck.scenario.layers.base import Activation, AnyLayer, Norm
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between

MAX_LENGTH = 16
MAX_VOCABULARY = 64
MAX_HEADS = 32
"""Maximum heads. Generated scenarios usually have fewer, but a run that resumes on 7 ranks after 4 may need 28."""
MAX_HEAD_WIDTH = 8
MAX_HIDDEN = 32
MAX_DROPOUT = 0.9
ROTARY_BASE = 100.0
"""Ratio between the first and last rotation frequency in a head. It is small because sequences are short."""


@frozen_dataclass
class Tokens:
    """Token embedding before the layers. The embedding dim is the model's `features`."""

    tag: ClassVar[str] = "tokens"
    vocabulary: int
    """Vocabulary size, 2 to 64."""
    padding: int | None = None
    """Token whose embedding gets no gradient (`padding_idx`); None for no such token."""
    learned_positions: bool = False
    """Whether a learned position embedding is added."""
    frozen: bool = False
    """Whether the embeddings have `requires_grad=False`, including the weight that a tied head shares."""

    def __post_init__(self) -> None:
        require_between(self, "vocabulary", 2, MAX_VOCABULARY)
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise invalid_field(self, "padding", f"None or a token from 0 to {self.vocabulary - 1}")

    def rounded_up(self, multiple: int) -> Tokens:
        """Return a copy with the vocabulary rounded up to a multiple of `multiple`.

        If the result exceeds the maximum, `multiple` is used instead, or the maximum if that is smaller.
        """
        up = -(-self.vocabulary // multiple) * multiple
        vocabulary = up if up <= MAX_VOCABULARY else min(multiple, MAX_VOCABULARY)
        return replace(self, vocabulary=vocabulary, padding=None if self.padding is None else self.padding % vocabulary)


@frozen_dataclass
class Head:
    """Output projection from features to vocabulary logits: ``linear(norm(x))``."""

    tied: bool = False
    """Whether the head shares the embedding's weight."""
    bias: bool = False
    """Whether the head has a bias."""
    norm: Norm | None = None
    """Normalization before the linear, with learned weights; None disables it."""
    predicts_two: bool = False
    """Whether a second projection predicts the token after the next one (multi-token prediction). Both projections are one
    linear; its last rows are for the second projection. The loss is the mean of both predictions' losses, each divided by its own
    labels.
    """

    def __post_init__(self) -> None:
        if self.predicts_two and self.tied:
            raise invalid_field(self, "tied", "False if predicts_two is True", "the embedding has no second projection")


@frozen_dataclass
class Attention(AnyLayer):
    """Self-attention over positions: ``residual(dropout(output(attention(query(norm(x)), key(norm(x)), value(norm(x))))))``."""

    tag: ClassVar[str] = "attention"
    needs_length: ClassVar[bool] = True
    num_heads: int = 1
    """Query heads, 1 to 32."""
    num_kv_heads: int = 1
    """Key and value heads (grouped-query attention); must divide the number of query heads."""
    head_dim: int = 2
    """Features in each head, 1 to 8; even with rotary embeddings."""
    causal: bool = True
    """Whether attention is causal."""
    rotary: bool = False
    """Whether rotary position embeddings are applied to query and key."""
    fused: bool = False
    """Whether to use `scaled_dot_product_attention` instead of explicit matmuls and a softmax."""
    bias: bool = False
    """Whether the four linears have a bias."""
    norm: Norm | None = None
    """Normalization before the linears, with learned weights; None disables it."""
    residual: bool = True
    """Whether the layer adds its input to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output element, 0 to 0.9. Masks are drawn with the data, so all ranks and the single-device run
    agree."""
    frozen: bool = False
    """Whether this layer's parameters have `requires_grad=False`."""

    def __post_init__(self) -> None:
        require_between(self, "num_heads", 1, MAX_HEADS)
        require_between(self, "num_kv_heads", 1, self.num_heads)
        require_between(self, "head_dim", 1, MAX_HEAD_WIDTH)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)
        if self.num_heads % self.num_kv_heads:
            raise invalid_field(self, "num_kv_heads", f"a divisor of num_heads ({self.num_heads})")
        if self.rotary and self.head_dim % 2:
            raise invalid_field(self, "head_dim", "an even number if rotary is True")

    def rounded_up(self, multiple: int) -> Attention:
        """Return a copy with more or larger heads, so that `num_heads` times `head_dim` is a multiple of `multiple`.

        This product increases as little as possible. It decreases only if no allowed sizes are large enough. `num_kv_heads` is
        kept if it divides the new `num_heads`, and `num_kv_heads` times `head_dim` is a multiple, too. Otherwise each query head
        gets its own key and value head.
        """
        step = 1 + self.rotary
        sizes = [(heads, width) for heads in range(1, MAX_HEADS + 1) for width in range(step, MAX_HEAD_WIDTH + 1, step)]
        even = [size for size in sizes if math.prod(size) % multiple == 0]
        as_large = [size for size in even if size[0] >= self.num_heads and size[1] >= self.head_dim]
        heads, width = min(as_large or even, key=math.prod, default=(MAX_HEADS, MAX_HEAD_WIDTH))
        grouped = heads % self.num_kv_heads == 0 and self.num_kv_heads * width % multiple == 0
        return replace(self, num_heads=heads, num_kv_heads=self.num_kv_heads if grouped else heads, head_dim=width)


@frozen_dataclass
class GatedMLP(AnyLayer):
    """Gated MLP: ``residual(dropout(down(activation(gate(norm(x))) * up(norm(x)))))``."""

    tag: ClassVar[str] = "gated_mlp"
    hidden: int
    """Hidden features, 1 to 32."""
    activation: Activation = Activation.SILU
    """Activation on the gate projection."""
    bias: bool = False
    """Whether the three linears have a bias."""
    norm: Norm | None = None
    """Normalization before the linears, with learned weights; None disables it."""
    residual: bool = True
    """Whether the layer adds its input to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output element, 0 to 0.9. Masks are drawn with the data, so all ranks and the single-device run
    agree."""
    frozen: bool = False
    """Whether this layer's parameters have `requires_grad=False`."""

    def __post_init__(self) -> None:
        require_between(self, "hidden", 1, MAX_HIDDEN)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)

    def rounded_up(self, multiple: int) -> GatedMLP:
        """Return a copy with the hidden features rounded up to a multiple of `multiple`.

        If the result exceeds the maximum, `multiple` is used instead, or the maximum if that is smaller.
        """
        up = -(-self.hidden // multiple) * multiple
        return replace(self, hidden=up if up <= MAX_HIDDEN else min(multiple, MAX_HIDDEN))
