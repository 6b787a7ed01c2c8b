"""Experts of which a router chooses a few for each position."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from equivcheck.scenario import AnyLayer, Experts, Split
from equivcheck.training.layers.experts.script import experts_script
from equivcheck.training.layers.facts import Dispatch, Initial, ParameterOf, ShardingChoice, norm_parameters
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


class ExpertsKind(LayerKind):
    """A router, gated perceptrons side by side, and one that all positions share."""

    noun: ClassVar[type[AnyLayer]] = Experts

    def parameters(self, layer: Experts, inputs: int) -> tuple[ParameterOf, ...]:
        """Those of the norm and the router, of all experts with these as first dim, and of the shared one."""
        router = ParameterOf(name="router.weight", shape=(layer.num_experts, inputs), initial=Initial.WEIGHT)
        routed = _gated_parameters("experts", layer, inputs, (layer.num_experts,))
        shared = _gated_parameters("shared", layer, inputs) if layer.shared else ()
        return (*norm_parameters(layer.norm, inputs), router, *routed, *shared)

    def build(self, layer: Experts, inputs: int) -> LayerModule:
        """An `ExpertsModule`."""
        from equivcheck.training.layers.experts.module import ExpertsModule

        return ExpertsModule(layer, inputs)

    def dispatch(self, layer: Experts) -> Dispatch:
        """Rows to experts; those of a norm, or weighted, depend on trained parameters."""
        trains_rows = not layer.frozen and (layer.norm is not None or layer.weighs_input)
        return Dispatch(trains_rows=trains_rows, num_counted=layer.num_experts if layer.balance else 0)

    def num_linears(self, layer: Experts) -> int:
        """The router, and three of each expert."""
        return 1 + 3 * (layer.num_experts + layer.shared)

    def choices(self, layer: Experts) -> tuple[ShardingChoice, ...]:
        """By the features within each expert, the shared one too; the router is whole on every rank."""
        words = "features within each expert"
        return (ShardingChoice(split=Split.WITHIN, units=layer.hidden, words=words, weights=layer.num_experts),)

    def ready(self, layer: Experts, inputs: int, *, autocast: bool = False) -> tuple[str, ...]:  # noqa: ARG002 - never under it
        """The shared expert, then the others, from the last linear to the first, bias first; then the router and the norm."""
        names = [parameter.name for parameter in self.parameters(layer, inputs)]
        linears = [name for name in names if name.startswith(("experts.", "shared."))]
        return (*reversed(linears), "router.weight", *(name for name in names if name.startswith("norm.")))

    def script(self, layer: Experts, inputs: int) -> LayerScript:
        """As the module that it is here."""
        return experts_script(layer, inputs)

    def propagated(self, layer: Experts) -> AnyLayer:
        """Every expert computes every position."""
        return self.with_known_shapes(layer)

    def with_known_shapes(self, layer: Experts) -> AnyLayer:
        """Every expert computes every position: how many choose it depends on values."""
        return layer.having(dispatched=False)


def _gated_parameters(owner: str, layer: Experts, inputs: int, stacked: tuple[int, ...] = ()) -> tuple[ParameterOf, ...]:
    """Those of a gate, an upward linear and one back, or of several with these as first dim."""
    found, expert_dim = [], 0 if stacked else None
    for name, outputs, features, dim in (
        ("gate", layer.hidden, inputs, 0),
        ("up", layer.hidden, inputs, 0),
        ("down", inputs, layer.hidden, 1),
    ):
        shape, within = (*stacked, outputs, features), len(stacked) + dim
        found.append(
            ParameterOf(name=f"{owner}.{name}", shape=shape, initial=Initial.WEIGHT, expert_dim=expert_dim, within_dim=within)
        )
        if layer.bias:
            found.append(
                ParameterOf(
                    name=f"{owner}.{name}_bias",
                    shape=shape[:-1],
                    initial=Initial.OFFSET,
                    expert_dim=expert_dim,
                    within_dim=None if dim else within,
                )
            )
    return tuple(found)
