"""Self-attention over positions, with grouped heads of key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layers.attention.script import attention_script
from equivcheck.layers.facts import ParameterOf, linear_parameters_of, norm_parameters, ready_linears
from equivcheck.layers.kind import LayerKind
from equivcheck.layers.script import LayerScript
from equivcheck.scenario import AnyLayer, Attention
from equivcheck.scenario.token_layers import MAX_HEADS

if TYPE_CHECKING:
    from equivcheck.layers.module import LayerModule


class AttentionKind(LayerKind):
    """Query, key, value and output, whose heads are neighbours."""

    noun: ClassVar[type[AnyLayer]] = Attention

    def parameters(self, layer: Attention, inputs: int) -> tuple[ParameterOf, ...]:
        """Those of the norm and of four linears."""
        wide, narrow = layer.heads * layer.head_width, layer.kv_heads * layer.head_width
        sizes = {"query": (inputs, wide), "key": (inputs, narrow), "value": (inputs, narrow), "output": (wide, inputs)}
        linears = (linear_parameters_of(name, *size, bias=layer.bias) for name, size in sizes.items())
        return (*norm_parameters(layer.norm, inputs), *(parameter for linear in linears for parameter in linear))

    def build(self, layer: Attention, inputs: int) -> LayerModule:
        """An `AttentionModule`."""
        from equivcheck.layers.attention.module import AttentionModule

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
        kv_heads, heads = (min(-(-count // multiple) * multiple, MAX_HEADS) for count in (layer.kv_heads, layer.heads))
        return layer.having(heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else heads)
