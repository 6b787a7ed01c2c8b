"""Base class for layer kinds. A layer kind tells the train loop, parallelisms and exported scripts about one scenario layer."""

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
    """Base class for layer kinds: everything that equivcheck needs to know about one scenario layer class.

    Third parties subclass it and `AnyLayer`, and register the kind as an entry point in the group ``equivcheck.layers``.
    Importing its module must not import torch, because scenarios are generated without torch.
    """

    layer_class: ClassVar[type[AnyLayer]]
    """Scenario layer class that this kind describes."""

    @abstractmethod
    def parameters(self, layer: Any, in_features: int) -> tuple[LayerParameter, ...]:
        """List the parameters that the layer owns, in the order of `torch.nn.Module.named_parameters`."""

    @abstractmethod
    def build(self, layer: Any, in_features: int) -> LayerModule:
        """Build the layer's module.

        Its input has shape (rows, length, inputs) or (rows, inputs). In the output, the layer's output features replace the last
        dim. Parameter values are assigned later. The module must not draw initial values, because that would use the process-wide
        generator.
        """

    def linears(self, layer: Any) -> tuple[LayerLinear, ...]:  # noqa: ARG002 - used by overriding methods
        """List the layer's linears in the order in which they run.

        If the result is empty, the linears are unknown, and tensor parallelism can only use plain tensors.
        """
        return ()

    def num_linears(self, layer: Any) -> int:
        """Return how many linears the layer contains. The time for compiling the layer grows with this number."""
        return len(self.linears(layer))

    def shardings(self, layer: Any) -> tuple[LayerSharding, ...]:  # noqa: ARG002 - used by overriding methods
        """Return the ways to shard the layer's linears, in addition to replicating them."""
        return ()

    def attention_shape(self, layer: Any) -> AttentionShape | None:  # noqa: ARG002 - used by overriding methods
        """Return how many attention heads the layer has, and their size.

        None if the layer's module computes any attention without its attribute `sequence`. If such a layer needs the sequence
        length, context parallelism cannot run it.
        """
        return None

    def dispatch(self, layer: Any) -> Dispatch | None:  # noqa: ARG002 - used by overriding methods
        """Return how the layer sends rows to experts that can lie on several ranks; None if it has no experts."""
        return None

    def script(self, layer: Any, in_features: int) -> LayerScript | None:  # noqa: ARG002 - used by overriding methods
        """Return the module's code for an exported script; None if the layer cannot be exported."""
        return None

    def gradient_order(self, layer: Any, in_features: int, *, autocast: bool = False) -> tuple[str, ...] | None:  # noqa: ARG002 - used by overriding methods
        """Return the layer's parameter names in the order in which backward produces gradients; None if it is unknown.

        The parameters used last in forward come first. Under autocast, the order differs because each gradient is first cast back
        to the parameter's dtype.
        """
        return None

    def mask_shape(self, layer: Any, in_features: int, length: int | None) -> Shape | None:
        """Return the shape of the dropout mask for one row; None without dropout."""
        if not layer.dropout:
            return None
        return (layer.out_features(in_features),) if length is None else (length, layer.out_features(in_features))

    def with_dtensor_strategies(self, layer: Any) -> AnyLayer:
        """Return the layer, or a similar layer whose operations all have DTensor sharding strategies."""
        found: AnyLayer = layer
        return found

    def with_known_shapes(self, layer: Any) -> AnyLayer:
        """Return the layer, or a similar layer whose shapes do not depend on values. `torch.vmap` and graph tracing need this."""
        found: AnyLayer = layer
        return found

    def with_divisible_units(self, layer: Any, multiple: int) -> AnyLayer:  # noqa: ARG002 - used by overriding methods
        """Return the layer, or a similar layer whose number of units, such as heads, is divisible by `multiple`.

        A layer without units is returned unchanged.
        """
        found: AnyLayer = layer
        return found

    def strategy(self, in_features: int) -> SearchStrategy[Any] | None:  # noqa: ARG002 - used by overriding methods
        """Return a Hypothesis strategy for layers with this many input features. None keeps the kind out of generated models."""
        return None
