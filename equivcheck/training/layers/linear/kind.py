"""Linear layer with norm, activation, dropout and residual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import Activation, AnyLayer, AuxiliaryLinear, Layer, Split
from equivcheck.training.layers.facts import ParameterOf, Part, ShardingChoice
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.linear.facts import linear_parameters

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


class LinearKind(LayerKind):
    """Linear with norm, activation, dropout, residual and an auxiliary linear."""

    noun: ClassVar[type[AnyLayer]] = Layer

    def parameters(self, layer: Layer, inputs: int) -> tuple[ParameterOf, ...]:
        """Parameters in norm, linear and auxiliary linear."""
        return linear_parameters(layer, inputs)

    def build(self, layer: Layer, inputs: int) -> LayerModule:
        """Build a `Block`."""
        from equivcheck.training.layers.linear.module import Block

        return Block(layer, inputs)

    def parts(self, layer: Layer) -> tuple[Part, ...]:
        """The linear and the auxiliary one."""
        activated = layer.activation is not Activation.IDENTITY
        linear = Part(name="linear", reads_input=True, gives_output=True, activated=activated)
        return (linear,) if layer.auxiliary is None else (linear, replace(linear, name="auxiliary", runs=layer.auxiliary))

    def choices(self, layer: Layer) -> tuple[ShardingChoice, ...]:  # noqa: ARG002 - of the base class
        """Colwise and rowwise sharding."""
        return (ShardingChoice(split=Split.COLUMN), ShardingChoice(split=Split.ROW))

    def ready(self, layer: Layer, inputs: int, *, autocast: bool = False) -> tuple[str, ...]:
        """Reverse order of computation. A shared weight is ready at its first use."""
        linear = ("linear.weight", "linear.bias") if autocast else ("linear.bias", "linear.weight")
        order = ("auxiliary.weight", *linear, "norm.weight", "norm.bias")
        owned = {each.name for each in self.parameters(layer, inputs) if each.runs is not AuxiliaryLinear.NEVER}
        return tuple(name for name in order if name in owned)
