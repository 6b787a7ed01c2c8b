"""Linear with a LoRA adapter: a frozen base, and two trained linears with few features between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, LoRALinear, Split
from equivcheck.training.layers.facts import (
    Initialization,
    LayerLinear,
    LayerParameter,
    LayerSharding,
    linear_parameters_of,
    ready_linears,
)
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript, linear_lines

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


_BASE = LayerLinear(name="base", reads_input=True, gives_output=True)
_A = LayerLinear(name="lora_a", reads_input=True, replicated_under=Split.COLWISE)
_B = LayerLinear(name="lora_b", gives_output=True, replicated_under=Split.ROWWISE)


class LoRAKind(LayerKind):
    """Layer kind for a linear with a LoRA adapter."""

    layer_class: ClassVar[type[AnyLayer]] = LoRALinear

    def parameters(self, layer: LoRALinear, in_features: int) -> tuple[LayerParameter, ...]:
        """List the weights of the base and of the adapter's two linears.

        In fine-tuning, the adapter's second weight starts with zeros. Here it does not, because the first weight would have a
        gradient of zeros in the first step.
        """
        weight = Initialization.WEIGHT
        return (
            *linear_parameters_of("base", in_features, in_features, is_frozen=layer.frozen_base),
            LayerParameter(name="lora_a.weight", shape=(layer.rank, in_features), initial=weight, rowwise_dim=1),
            LayerParameter(name="lora_b.weight", shape=(in_features, layer.rank), initial=weight, colwise_dim=0),
        )

    def linears(self, layer: LoRALinear) -> tuple[LayerLinear, ...]:  # noqa: ARG002 - of the base class
        """List the base, then the adapter's two linears."""
        return (_BASE, _A, _B)

    def shardings(self, layer: LoRALinear) -> tuple[LayerSharding, ...]:  # noqa: ARG002 - of the base class
        """Return column-parallel and row-parallel sharding. One of the adapter's weights is sharded like the base."""
        return (LayerSharding(split=Split.COLWISE), LayerSharding(split=Split.ROWWISE))

    def build(self, layer: LoRALinear, in_features: int) -> LayerModule:
        """Build a `LoRAModule`."""
        from equivcheck.training.layers.lora.module import LoRAModule

        return LoRAModule(layer, in_features)

    def gradient_order(self, layer: LoRALinear, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """List the trained weights in reverse order of computation."""
        trained = tuple(each for each in self.parameters(layer, in_features) if not each.is_frozen)
        return ready_linears(trained, ("lora_b", "lora_a", "base"), autocast=autocast)

    def script(self, layer: LoRALinear, in_features: int) -> LayerScript:
        """Return the module's code for an exported script."""
        frozen = ("self.base.requires_grad_(False)",) if layer.frozen_base else ()
        return LayerScript(
            name="LoRALinear",
            words="Linear with a LoRA adapter: base(inputs) + scale * lora_b(lora_a(inputs))",
            init=(*linear_lines(self.parameters(layer, in_features)), *frozen),
            compute=(f"values = self.base(inputs) + {layer.scale!r} * self.lora_b(self.lora_a(inputs))",),
        )
