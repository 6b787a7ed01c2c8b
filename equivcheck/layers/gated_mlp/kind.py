"""Gated multi-layer perceptrons, as SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.layers.facts import ParameterOf, linear_parameters_of, norm_parameters, ready_linears
from equivcheck.layers.kind import LayerKind
from equivcheck.layers.script import ACTIVATIONS, LayerScript, linear_lines, norm_line
from equivcheck.scenario import AnyLayer, GatedMLP

if TYPE_CHECKING:
    from equivcheck.layers.module import LayerModule


class GatedMLPKind(LayerKind):
    """A gate and an upward linear, multiplied, and one back."""

    noun: ClassVar[type[AnyLayer]] = GatedMLP

    def parameters(self, layer: GatedMLP, inputs: int) -> tuple[ParameterOf, ...]:
        """Those of the norm and of three linears."""
        sizes = {"gate": (inputs, layer.hidden), "up": (inputs, layer.hidden), "down": (layer.hidden, inputs)}
        linears = (linear_parameters_of(name, *size, bias=layer.bias) for name, size in sizes.items())
        return (*norm_parameters(layer.norm, inputs), *(parameter for linear in linears for parameter in linear))

    def build(self, layer: GatedMLP, inputs: int) -> LayerModule:
        """A `GatedMLPModule`."""
        from equivcheck.layers.gated_mlp.module import GatedMLPModule

        return GatedMLPModule(layer, inputs)

    def ready(self, layer: GatedMLP, inputs: int, *, autocast: bool = False) -> tuple[str, ...]:
        """The linears in reverse, each with its bias first, then the norm."""
        return ready_linears(self.parameters(layer, inputs), ("down", "up", "gate"), autocast=autocast)

    def script(self, layer: GatedMLP, inputs: int) -> LayerScript:
        """As the module that it is here."""
        function = ACTIVATIONS.get(layer.activation, ("", ""))[1]
        gate = f"{function}(self.gate(normed))" if function else "self.gate(normed)"
        return LayerScript(
            name="GatedMLP",
            words="A gate and an upward linear, multiplied, and one back",
            init=(*norm_line(layer.norm, inputs), *linear_lines(self.parameters(layer, inputs))),
            compute=(
                f"normed = {'self.norm(inputs)' if layer.norm else 'inputs'}",
                f"values = self.down({gate} * self.up(normed))",
            ),
            imports=(("torch.nn", "functional"),) if function.startswith("functional") else (),
        )
