"""Self-attention with grouped key and value heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, Attention, Split
from equivcheck.scenario.layers.token_layers import MAX_HEADS
from equivcheck.training.layers.attention.script import attention_script
from equivcheck.training.layers.facts import (
    AttentionShape,
    LayerLinear,
    LayerParameter,
    LayerSharding,
    norm_parameters,
    part_parameters,
    ready_linears,
)
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


_READING = tuple(LayerLinear(name=name, reads_input=True) for name in ("query", "key", "value"))
_OUTPUT = LayerLinear(name="output", gives_output=True)


class AttentionKind(LayerKind):
    """Layer kind for self-attention: query, key, value and output linears."""

    layer_class: ClassVar[type[AnyLayer]] = Attention

    def parameters(self, layer: Attention, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters in the norm and the four linears."""
        wide, narrow = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        sizes = ((in_features, wide), (in_features, narrow), (in_features, narrow), (wide, in_features))
        linears = (part_parameters(part, *size, bias=layer.bias) for part, size in zip(self.linears(layer), sizes, strict=True))
        return (*norm_parameters(layer.norm, in_features), *(parameter for linear in linears for parameter in linear))

    def linears(self, layer: Attention) -> tuple[LayerLinear, ...]:  # noqa: ARG002 - of the base class
        """List the query, key and value linears, then the output linear."""
        return (*_READING, _OUTPUT)

    def shardings(self, layer: Attention) -> tuple[LayerSharding, ...]:
        """Return the sharding by key and value heads. A key head's query heads are on the same rank."""
        return (LayerSharding(split=Split.HEADS_OR_HIDDEN, units=layer.num_kv_heads, words="key and value heads"),)

    def attention_shape(self, layer: Attention) -> AttentionShape:
        """Return how many heads the layer has, and their size."""
        return AttentionShape(num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, width=layer.head_dim)

    def build(self, layer: Attention, in_features: int) -> LayerModule:
        """Build an `AttentionModule`."""
        from equivcheck.training.layers.attention.module import AttentionModule

        return AttentionModule(layer, in_features)

    def gradient_order(self, layer: Attention, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """List the linears' parameters in reverse order, bias first, then the norm's."""
        return ready_linears(self.parameters(layer, in_features), ("output", "value", "key", "query"), autocast=autocast)

    def script(self, layer: Attention, in_features: int) -> LayerScript:
        """Return the module's code for an exported script."""
        return attention_script(layer, in_features, self.parameters(layer, in_features))

    def with_dtensor_strategies(self, layer: Attention) -> AnyLayer:
        """Return the layer without the fused kernel, because DTensor has no sharding strategy for it."""
        return layer.with_fields(fused=False)

    def with_divisible_units(self, layer: Attention, multiple: int) -> AnyLayer:
        """Return the layer with its head counts rounded up to a multiple of `multiple`."""
        num_kv_heads, heads = (_even(count, multiple) for count in (layer.num_kv_heads, layer.num_heads))
        return layer.with_fields(num_heads=heads, num_kv_heads=num_kv_heads if heads % num_kv_heads == 0 else heads)


def _even(count: int, multiple: int) -> int:
    """Return the next multiple of `multiple`; the largest allowed multiple if that exceeds `MAX_HEADS`."""
    up = -(-count // multiple) * multiple
    return up if up <= MAX_HEADS else MAX_HEADS // multiple * multiple
