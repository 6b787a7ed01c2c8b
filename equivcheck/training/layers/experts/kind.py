"""Mixture of gated MLPs with a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, Experts, Split
from equivcheck.training.layers.experts.script import experts_script
from equivcheck.training.layers.facts import Dispatch, Initialization, LayerParameter, LayerSharding, norm_parameters
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


class ExpertsKind(LayerKind):
    """Layer kind for a mixture of experts: router, stacked experts, and an optional shared expert."""

    layer_class: ClassVar[type[AnyLayer]] = Experts

    def parameters(self, layer: Experts, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters in norm, router, stacked experts (experts along dim 0) and shared expert."""
        router = LayerParameter(name="router.weight", shape=(layer.num_experts, in_features), initial=Initialization.WEIGHT)
        routed = _gated_parameters("experts", layer, in_features, (layer.num_experts,))
        shared = _gated_parameters("shared", layer, in_features) if layer.shared else ()
        return (*norm_parameters(layer.norm, in_features), router, *routed, *shared)

    def build(self, layer: Experts, in_features: int) -> LayerModule:
        """Build an `ExpertsModule`."""
        from equivcheck.training.layers.experts.module import ExpertsModule

        return ExpertsModule(layer, in_features)

    def dispatch(self, layer: Experts) -> Dispatch:
        """Return how the layer sends rows to experts.

        Sent rows need gradients if the layer trains parameters that act on them before the experts: a norm's, or the router's if
        router weights multiply the experts' inputs.
        """
        trains_rows = not layer.frozen and (layer.norm is not None or layer.weighs_input)
        return Dispatch(
            trains_rows=trains_rows,
            num_counted=layer.num_experts if layer.balance and not layer.balance_per_sequence else 0,
            num_counted_each_sequence=layer.num_experts if layer.balance_per_sequence else 0,
            num_counted_each_step=layer.num_experts if layer.router_bias_rate else 0,
        )

    def num_linears(self, layer: Experts) -> int:
        """Count the linears in the router and in all experts."""
        return 1 + 3 * (layer.num_experts + layer.shared)

    def shardings(self, layer: Experts) -> tuple[LayerSharding, ...]:
        """Return the sharding by the hidden features in each expert, the shared expert included. The router is replicated."""
        words = "features within each expert"
        return (LayerSharding(split=Split.HEADS_OR_HIDDEN, units=layer.hidden, words=words, weights=layer.num_experts),)

    def gradient_order(self, layer: Experts, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """List the shared expert's parameters, then the routed experts', each from last to first, then router and norm.

        A bias comes before its weight. Under autocast, the shared expert's weights come first, because the last cast in forward
        is the first in backward. Routed experts are selected from their parameters before the casts, so their order stays.
        """
        attributes = ("_bias", "")
        shared = _names_of("shared", attributes[::-1] if autocast else attributes)
        order = (*shared, *_names_of("experts", attributes), "router.weight", "norm.weight", "norm.bias")
        owned = {parameter.name for parameter in self.parameters(layer, in_features)}
        return tuple(name for name in order if name in owned)

    def script(self, layer: Experts, in_features: int) -> LayerScript:
        """Return the module's code for an exported script."""
        return experts_script(layer, in_features)

    def with_dtensor_strategies(self, layer: Experts) -> AnyLayer:
        """Return a layer in which every expert computes every position.

        DTensor has sharding strategies for all operations in this layer.
        """
        return self.with_known_shapes(layer)

    def with_known_shapes(self, layer: Experts) -> AnyLayer:
        """Return a layer in which every expert computes every position, because the number of routed rows depends on values."""
        return layer.with_fields(dispatched=False, grouped=False)


def _names_of(owner: str, attributes: tuple[str, ...]) -> tuple[str, ...]:
    """List the parameters of one expert, or of stacked experts, from the last linear to the first."""
    return tuple(f"{owner}.{linear}{attribute}" for linear in ("down", "up", "gate") for attribute in attributes)


def _gated_parameters(owner: str, layer: Experts, in_features: int, stacked: tuple[int, ...] = ()) -> tuple[LayerParameter, ...]:
    """List the parameters in one gated MLP, or in several MLPs stacked along a first dim."""
    found, expert_dim = [], 0 if stacked else None
    for name, outputs, features, dim in (
        ("gate", layer.hidden, in_features, 0),
        ("up", layer.hidden, in_features, 0),
        ("down", in_features, layer.hidden, 1),
    ):
        shape, within = (*stacked, outputs, features), len(stacked) + dim
        found.append(
            LayerParameter(
                name=f"{owner}.{name}", shape=shape, initial=Initialization.WEIGHT, expert_dim=expert_dim, unit_dim=within
            )
        )
        if layer.bias:
            found.append(
                LayerParameter(
                    name=f"{owner}.{name}_bias",
                    shape=shape[:-1],
                    initial=Initialization.OFFSET,
                    expert_dim=expert_dim,
                    unit_dim=None if dim else within,
                )
            )
    return tuple(found)
