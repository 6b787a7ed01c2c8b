"""Linear layer with norm, activation, dropout and residual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import Activation, AnyLayer, AuxiliaryLinear, Layer, Split
from equivcheck.training.layers.facts import Initialization, LayerLinear, LayerParameter, LayerSharding, norm_parameters
from equivcheck.training.layers.kind import LayerKind

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


class LinearKind(LayerKind):
    """Layer kind for a linear with norm, activation, dropout and residual. A second, auxiliary linear may add to its output."""

    layer_class: ClassVar[type[AnyLayer]] = Layer

    def parameters(self, layer: Layer, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters in norm, linear and auxiliary linear."""
        matrix, vector = (layer.width, in_features), (layer.width,)
        weight = LayerParameter(
            name="linear.weight", shape=matrix, initial=Initialization.UNIT_WEIGHT, colwise_dim=0, rowwise_dim=1
        )
        bias = LayerParameter(name="linear.bias", shape=vector, initial=Initialization.UNIT_OFFSET, colwise_dim=0)
        auxiliary = LayerParameter(
            name="auxiliary.weight",
            shape=matrix,
            initial=Initialization.WEIGHT,
            colwise_dim=0,
            rowwise_dim=1,
            runs=layer.auxiliary,
        )
        return (
            *norm_parameters(layer.norm, in_features),
            *((weight,) if layer.shares is None else ()),
            *((bias,) if layer.bias else ()),
            *(() if layer.auxiliary is None else (auxiliary,)),
        )

    def build(self, layer: Layer, in_features: int) -> LayerModule:
        """Build a `Block`."""
        from equivcheck.training.layers.linear.module import Block

        return Block(layer, in_features)

    def linears(self, layer: Layer) -> tuple[LayerLinear, ...]:
        """List the main linear, then the auxiliary linear."""
        activated = layer.activation is not Activation.IDENTITY
        linear = LayerLinear(name="linear", reads_input=True, gives_output=True, activated=activated)
        return (linear,) if layer.auxiliary is None else (linear, replace(linear, name="auxiliary", runs=layer.auxiliary))

    def shardings(self, layer: Layer) -> tuple[LayerSharding, ...]:  # noqa: ARG002 - of the base class
        """Return column-parallel and row-parallel sharding."""
        return (LayerSharding(split=Split.COLWISE), LayerSharding(split=Split.ROWWISE))

    def gradient_order(self, layer: Layer, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """List the parameters in reverse order of computation.

        If several layers share a weight, only the first layer lists it, because the weight's gradient is complete after this
        layer's backward.
        """
        linear = ("linear.weight", "linear.bias") if autocast else ("linear.bias", "linear.weight")
        order = ("auxiliary.weight", *linear, "norm.weight", "norm.bias")
        owned = {each.name for each in self.parameters(layer, in_features) if each.runs is not AuxiliaryLinear.NEVER}
        return tuple(name for name in order if name in owned)
