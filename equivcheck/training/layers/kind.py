"""Interface of a layer kind for the train loop, parallelisms and exported scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from equivcheck.scenario import AnyLayer
from equivcheck.training.layers.facts import AttentionShape, Dispatch, LayerLinear, LayerParameter, LayerSharding, Shape
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivcheck.training.layers.module import LayerModule


class LayerKind(ABC):
    """Kind of layer. Third parties subclass it, with a subclass of `AnyLayer`, and register it as an entry point.

    Importing its module must not import torch, because generating scenarios only needs the properties.
    """

    layer_class: ClassVar[type[AnyLayer]]
    """Scenario class that the kind implements."""

    @abstractmethod
    def parameters(self, layer: Any, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters that the layer owns, in the order of `torch.nn.Module.named_parameters`."""

    @abstractmethod
    def build(self, layer: Any, in_features: int) -> LayerModule:
        """Build the module.

        It maps (rows, length, inputs) or (rows, inputs) to the same shape with the layer's output features.

        Parameter values are replaced later. The module must not draw them itself, because that would use the process-wide
        generator.
        """

    def linears(self, layer: Any) -> tuple[LayerLinear, ...]:  # noqa: ARG002 - used by overriding methods
        """List the linears in the order in which they run.

        An empty result means that they are unknown: then tensor parallelism needs plain tensors.
        """
        return ()

    def num_linears(self, layer: Any) -> int:
        """Count the linear layers inside. The number determines how long the layer takes to compile."""
        return len(self.linears(layer))

    def shardings(self, layer: Any) -> tuple[LayerSharding, ...]:  # noqa: ARG002 - used by overriding methods
        """Return the ways to shard the layer's linears, in addition to replicating them."""
        return ()

    def attention_shape(self, layer: Any) -> AttentionShape | None:  # noqa: ARG002 - used by overriding methods
        """Return the attention heads, if the module attends only through its `sequence`; None otherwise.

        If a layer needs the length and returns None, context parallelism cannot run it.
        """
        return None

    def dispatch(self, layer: Any) -> Dispatch | None:  # noqa: ARG002 - used by overriding methods
        """Return the routing to units that can be distributed over ranks; None if the layer routes nothing."""
        return None

    def script(self, layer: Any, in_features: int) -> LayerScript | None:  # noqa: ARG002 - used by overriding methods
        """Return code for exported scripts; None if the layer cannot be exported."""
        return None

    def gradient_order(self, layer: Any, in_features: int, *, autocast: bool = False) -> tuple[str, ...] | None:  # noqa: ARG002 - used by overriding methods
        """Return parameter names in the order in which backward produces gradients; None if the order is unknown.

        The last computation comes first. Under autocast each gradient is cast back first, which changes the order.
        """
        return None

    def mask_shape(self, layer: Any, in_features: int, length: int | None) -> Shape | None:
        """Return the shape of the dropout mask for one row; None without dropout."""
        if not layer.dropout:
            return None
        return (layer.out_features(in_features),) if length is None else (length, layer.out_features(in_features))

    def with_dtensor_strategies(self, layer: Any) -> AnyLayer:
        """Return the closest layer whose operations all have DTensor sharding strategies. This can be the layer itself."""
        found: AnyLayer = layer
        return found

    def with_known_shapes(self, layer: Any) -> AnyLayer:
        """Return the closest layer without data-dependent shapes, for `torch.vmap` and graph tracing.

        This can be the layer itself.
        """
        found: AnyLayer = layer
        return found

    def with_divisible_units(self, layer: Any, multiple: int) -> AnyLayer:  # noqa: ARG002 - used by overriding methods
        """Return the closest layer whose number of units, such as heads, is divisible by `multiple`.

        A layer without units is returned unchanged.
        """
        found: AnyLayer = layer
        return found

    def strategy(self, in_features: int) -> SearchStrategy[Any] | None:  # noqa: ARG002 - used by overriding methods
        """Return a Hypothesis strategy for layers with this many input features. None keeps the kind out of generated models."""
        return None
