"""What a kind of layer has to say: to the train loop, to parallelisms, to exported scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from equivcheck.scenario import AnyLayer
from equivcheck.training.layers.facts import Dispatch, Looking, ParameterOf, Part, Shape, ShardingChoice
from equivcheck.training.layers.script import LayerScript

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivcheck.training.layers.module import LayerModule


class LayerKind(ABC):
    """One kind of layer. Third parties subclass it, with a noun derived from `AnyLayer`, and offer it by an entry point.

    Importing the module of a kind must not import torch: the generator asks for facts only.
    """

    noun: ClassVar[type[AnyLayer]]
    """The noun that it is about."""

    @abstractmethod
    def parameters(self, layer: Any, inputs: int) -> tuple[ParameterOf, ...]:
        """Each parameter that the layer owns, in the order of `torch.nn.Module.named_parameters`."""

    @abstractmethod
    def build(self, layer: Any, inputs: int) -> LayerModule:
        """Its module, which maps (rows, length, inputs), or (rows, inputs), to the same with its outputs last.

        The values of its parameters are replaced; a module that draws them itself would use the process-wide generator.
        """

    def parts(self, layer: Any) -> tuple[Part, ...]:  # noqa: ARG002 - for those whose linears are known
        """Its linears, in the order in which they run; none where it is not known which of its modules are such.

        A layer without any runs under tensor parallelism as plain tensors alone.
        """
        return ()

    def num_linears(self, layer: Any) -> int:
        """Those that it computes with, whether or not they are known: what compiling it takes is measured by them."""
        return len(self.parts(layer))

    def choices(self, layer: Any) -> tuple[ShardingChoice, ...]:  # noqa: ARG002 - for those that can be shared out
        """The ways in which ranks can share out its parts, besides leaving them whole."""
        return ()

    def looking(self, layer: Any) -> Looking | None:  # noqa: ARG002 - for those whose positions look at others
        """What its positions look at in others, if its module does that by its `sequence` alone; None for those that do not.

        A layer that needs the length and has none runs on whole sequences alone.
        """
        return None

    def dispatch(self, layer: Any) -> Dispatch | None:  # noqa: ARG002 - for those whose module is a `DispatchingModule`
        """How it gives rows to units which ranks can share out; None where it has no units."""
        return None

    def script(self, layer: Any, inputs: int) -> LayerScript | None:  # noqa: ARG002 - for those that can be exported
        """How an exported script writes it; None where none does."""
        return None

    def ready(self, layer: Any, inputs: int, *, autocast: bool = False) -> tuple[str, ...] | None:  # noqa: ARG002 - same
        """Names of parameters in the order in which backward has their gradients ready; None where that is not known.

        What was computed last comes first; under autocast each gradient is first cast back.
        """
        return None

    def mask(self, layer: Any, inputs: int, length: int | None) -> Shape | None:
        """Shape of its dropout mask for one row of the data; None where it has none."""
        if not layer.dropout:
            return None
        return (layer.outputs(inputs),) if length is None else (length, layer.outputs(inputs))

    def propagated(self, layer: Any) -> AnyLayer:
        """The nearest layer all of whose operations DTensor propagates; the same where it is one."""
        found: AnyLayer = layer
        return found

    def with_known_shapes(self, layer: Any) -> AnyLayer:
        """The nearest layer in which no shape depends on values, as `torch.vmap` and graphs ask for; the same where none does."""
        found: AnyLayer = layer
        return found

    def with_even_units(self, layer: Any, multiple: int) -> AnyLayer:  # noqa: ARG002 - for those that have units
        """The nearest layer that views features as a multiple of so many units, such as heads; the same where it views none."""
        found: AnyLayer = layer
        return found

    def strategy(self, inputs: int) -> SearchStrategy[Any] | None:  # noqa: ARG002 - for those that are drawn by themselves
        """Layers of the kind for so many inputs, as they are drawn into generated models; None for none."""
        return None
