"""Self-attention over positions, with grouped heads of key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, Attention, Split
from equivcheck.scenario.token_layers import MAX_HEADS
from equivcheck.training.layers.attention.script import attention_script
from equivcheck.training.layers.facts import (
    Looking,
    ParameterOf,
    Part,
    ShardingChoice,
    norm_parameters,
    part_parameters,
    ready_linears,
)
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


_READING = tuple(Part(name=name, reads_input=True) for name in ("query", "key", "value"))
_OUTPUT = Part(name="output", gives_output=True)


class AttentionKind(LayerKind):
    """Query, key, value and output, whose heads are neighbours."""

    noun: ClassVar[type[AnyLayer]] = Attention

    def parameters(self, layer: Attention, inputs: int) -> tuple[ParameterOf, ...]:
        """Those of the norm and of four linears."""
        wide, narrow = layer.heads * layer.head_width, layer.kv_heads * layer.head_width
        sizes = ((inputs, wide), (inputs, narrow), (inputs, narrow), (wide, inputs))
        linears = (part_parameters(part, *size, bias=layer.bias) for part, size in zip(self.parts(layer), sizes, strict=True))
        return (*norm_parameters(layer.norm, inputs), *(parameter for linear in linears for parameter in linear))

    def parts(self, layer: Attention) -> tuple[Part, ...]:  # noqa: ARG002 - of the base class
        """What makes query, key and value, and what maps what they give back."""
        return (*_READING, _OUTPUT)

    def choices(self, layer: Attention) -> tuple[ShardingChoice, ...]:
        """By heads: those of key and value, with all heads of the query that look through them."""
        return (ShardingChoice(split=Split.WITHIN, units=layer.kv_heads, words="heads of key and value"),)

    def looking(self, layer: Attention) -> Looking:
        """As many heads as there are."""
        return Looking(heads=layer.heads, kv_heads=layer.kv_heads, width=layer.head_width)

    def build(self, layer: Attention, inputs: int) -> LayerModule:
        """An `AttentionModule`."""
        from equivcheck.training.layers.attention.module import AttentionModule

        return AttentionModule(layer, inputs)

    def ready(self, layer: Attention, inputs: int, *, autocast: bool = False) -> tuple[str, ...]:
        """The linears in reverse, each with its bias first, then the norm."""
        return ready_linears(self.parameters(layer, inputs), ("output", "value", "key", "query"), autocast=autocast)

    def script(self, layer: Attention, inputs: int) -> LayerScript:
        """As the module that it is here."""
        return attention_script(layer, inputs, self.parameters(layer, inputs))

    def propagated(self, layer: Attention) -> AnyLayer:
        """By products and a softmax."""
        return layer.having(fused=False)

    def with_even_units(self, layer: Attention, multiple: int) -> AnyLayer:
        """As many heads of key and value as the next multiple, and of queries as many or more."""
        kv_heads, heads = (_even(count, multiple) for count in (layer.kv_heads, layer.heads))
        return layer.having(heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else heads)


def _even(count: int, multiple: int) -> int:
    """The next multiple, or the last one before there are too many heads."""
    up = -(-count // multiple) * multiple
    return up if up <= MAX_HEADS else MAX_HEADS // multiple * multiple
