"""Gated MLP, such as SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, GatedMLP, Split
from equivcheck.training.layers.facts import (
    LayerLinear,
    LayerParameter,
    LayerSharding,
    norm_parameters,
    part_parameters,
    ready_linears,
)
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import ACTIVATIONS, LayerScript, linear_lines, norm_line

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


_PARTS = (
    LayerLinear(name="gate", reads_input=True),
    LayerLinear(name="up", reads_input=True),
    LayerLinear(name="down", gives_output=True),
)


class GatedMLPKind(LayerKind):
    """Layer kind for a gated MLP: gate and up projections, whose outputs are multiplied, and a down projection."""

    layer_class: ClassVar[type[AnyLayer]] = GatedMLP

    def parameters(self, layer: GatedMLP, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters in the norm and the three linears."""
        sizes = ((in_features, layer.hidden), (in_features, layer.hidden), (layer.hidden, in_features))
        linears = (part_parameters(part, *size, bias=layer.bias) for part, size in zip(_PARTS, sizes, strict=True))
        return (*norm_parameters(layer.norm, in_features), *(parameter for linear in linears for parameter in linear))

    def linears(self, layer: GatedMLP) -> tuple[LayerLinear, ...]:  # noqa: ARG002 - of the base class
        """List the gate, up and down projections."""
        return _PARTS

    def shardings(self, layer: GatedMLP) -> tuple[LayerSharding, ...]:
        """Return the sharding by hidden features."""
        return (LayerSharding(split=Split.HEADS_OR_HIDDEN, units=layer.hidden, words="features within"),)

    def build(self, layer: GatedMLP, in_features: int) -> LayerModule:
        """Build a `GatedMLPModule`."""
        from equivcheck.training.layers.gated_mlp.module import GatedMLPModule

        return GatedMLPModule(layer, in_features)

    def gradient_order(self, layer: GatedMLP, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """List the linears' parameters in reverse order, bias first, then the norm's."""
        return ready_linears(self.parameters(layer, in_features), ("down", "up", "gate"), autocast=autocast)

    def script(self, layer: GatedMLP, in_features: int) -> LayerScript:
        """Return the module's code for an exported script."""
        function = ACTIVATIONS.get(layer.activation, ("", ""))[1]
        gate = f"{function}(self.gate(normed))" if function else "self.gate(normed)"
        return LayerScript(
            name="GatedMLP",
            words="Gated MLP: down(activation(gate(inputs)) * up(inputs))",
            init=(*norm_line(layer.norm, in_features), *linear_lines(self.parameters(layer, in_features))),
            compute=(
                f"normed = {'self.norm(inputs)' if layer.norm else 'inputs'}",
                f"values = self.down({gate} * self.up(normed))",
            ),
            imports=(("torch.nn", "functional"),) if function.startswith("functional") else (),
        )
