"""What token models have beside linear layers: embedded tokens, attention, gated multi-layer perceptrons, a head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from equivcheck.scenario.layer_base import Activation, AnyLayer, Norm
from equivcheck.scenario.noun import noun, refuse, require_between

MAX_LENGTH = 16
MAX_VOCABULARY = 64
MAX_HEADS = 32
"""More than are drawn: a training that goes from 4 ranks to 7 may need a multiple of 28."""
MAX_HEAD_WIDTH = 8
MAX_HIDDEN = 32
MAX_DROPOUT = 0.9


@noun
class Tokens:
    """The source of a model that is fed sequences of tokens: an embedding, whose width is the model's number of features."""

    tag: ClassVar[str] = "tokens"
    vocabulary: int
    """How many tokens there are, 2 to 64."""
    padding: int | None = None
    """The token whose row of the embedding gets no gradient (`padding_idx`); None for no such token."""
    learned_positions: bool = False
    """Whether a learnt vector for each position is added."""
    frozen: bool = False
    """Whether what is embedded by requires no gradient; the weight of a tied head is part of that."""

    def __post_init__(self) -> None:
        require_between(self, "vocabulary", 2, MAX_VOCABULARY)
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise refuse(self, "padding", f"None, or a token: 0 to {self.vocabulary - 1}")

    def rounded(self, multiple: int) -> Tokens:
        """A vocabulary rounded up to a multiple; where that is too much, the multiple."""
        up = -(-self.vocabulary // multiple) * multiple
        vocabulary = up if up <= MAX_VOCABULARY else min(multiple, MAX_VOCABULARY)
        return replace(self, vocabulary=vocabulary, padding=None if self.padding is None else self.padding % vocabulary)


@noun
class Head:
    """What maps the features of each position to a number for each token: ``linear(norm(x))``."""

    tied: bool = False
    """Whether its weight is that of the embedding."""
    bias: bool = False
    """Whether it has a bias."""
    norm: Norm | None = None
    """What normalises its input, with learnt weights; None for nothing."""


@noun
class Attention(AnyLayer):
    """Self-attention over positions: ``residual(dropout(output(attention(query(norm(x)), key(norm(x)), value(norm(x))))))``."""

    tag: ClassVar[str] = "attention"
    needs_length: ClassVar[bool] = True
    heads: int = 1
    """Heads of the query, 1 to 32."""
    kv_heads: int = 1
    """Heads of key and value, each for as many heads of the query; divides their number."""
    head_width: int = 2
    """Features of a head, 1 to 8; even with rotary positions."""
    causal: bool = True
    """Whether a position sees itself and earlier ones only."""
    rotary: bool = False
    """Whether query and key are turned by their position (rotary positions)."""
    fused: bool = False
    """Whether `scaled_dot_product_attention` computes it; else products and a softmax."""
    bias: bool = False
    """Whether the four linears have a bias."""
    norm: Norm | None = None
    """What normalises the input, with learnt weights; None for nothing."""
    residual: bool = True
    """Whether the layer's input is added to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output, 0 to 0.9; the mask belongs to the data: the same on one device and on many."""
    frozen: bool = False
    """Whether the parameters of this layer require no gradient."""

    def __post_init__(self) -> None:
        require_between(self, "heads", 1, MAX_HEADS)
        require_between(self, "kv_heads", 1, self.heads)
        require_between(self, "head_width", 1, MAX_HEAD_WIDTH)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)
        if self.heads % self.kv_heads:
            raise refuse(self, "kv_heads", f"a divisor of heads ({self.heads})")
        if self.rotary and self.head_width % 2:
            raise refuse(self, "head_width", "an even number with rotary positions")

    def rounded(self, multiple: int) -> Attention:
        """The least heads and widths of these and more whose product is a multiple; all heads apart where it must be so.

        Where these are too many, the least of all.
        """
        step = 1 + self.rotary
        sizes = [(heads, width) for heads in range(1, MAX_HEADS + 1) for width in range(step, MAX_HEAD_WIDTH + 1, step)]
        even = [size for size in sizes if math.prod(size) % multiple == 0]
        as_large = [size for size in even if size[0] >= self.heads and size[1] >= self.head_width]
        heads, width = min(as_large or even, key=math.prod, default=(MAX_HEADS, MAX_HEAD_WIDTH))
        grouped = heads % self.kv_heads == 0 and self.kv_heads * width % multiple == 0
        return replace(self, heads=heads, kv_heads=self.kv_heads if grouped else heads, head_width=width)


@noun
class GatedMLP(AnyLayer):
    """A gated multi-layer perceptron: ``residual(dropout(down(activation(gate(norm(x))) * up(norm(x)))))``."""

    tag: ClassVar[str] = "gated_mlp"
    hidden: int
    """Features between, 1 to 32."""
    activation: Activation = Activation.SILU
    """What follows the gate."""
    bias: bool = False
    """Whether the three linears have a bias."""
    norm: Norm | None = None
    """What normalises the input, with learnt weights; None for nothing."""
    residual: bool = True
    """Whether the layer's input is added to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output, 0 to 0.9; the mask belongs to the data: the same on one device and on many."""
    frozen: bool = False
    """Whether the parameters of this layer require no gradient."""

    def __post_init__(self) -> None:
        require_between(self, "hidden", 1, MAX_HIDDEN)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)

    def rounded(self, multiple: int) -> GatedMLP:
        """As many features between as the next multiple; where that is too many, the multiple."""
        up = -(-self.hidden // multiple) * multiple
        return replace(self, hidden=up if up <= MAX_HIDDEN else min(multiple, MAX_HIDDEN))
