"""Base class for all kinds of parallelism."""

from __future__ import annotations

from typing import ClassVar, Protocol

from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.system.choice import PrintableEnum


class StagePosition(PrintableEnum):
    """Whether a layout with a pipeline applies another parallelism before or after the pipeline."""

    INSIDE = "inside"
    """Before the pipeline. The parallelism changes layers, and stages then contain the changed layers."""
    AROUND = "around"
    """After the pipeline. The parallelism wraps the stages, because the pipeline calls them."""


class ParameterOwner(PrintableEnum):
    """Model part that owns a parameter."""

    MODEL = "model"
    SOURCE = "source"
    LAYER = "layer"
    HEAD = "head"


class ParameterFacts(Protocol):
    """Properties of a parameter, with which a parallelism decides how to shard it."""

    @property
    def owner(self) -> ParameterOwner:
        """Part of the model to which the parameter belongs."""

    @property
    def layer(self) -> int | None:
        """Index of the parameter's layer; None if it is outside all layers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape before sharding."""

    @property
    def trained(self) -> bool:
        """Whether the parameter has `requires_grad=True`."""

    @property
    def colwise_dim(self) -> int | None:
        """Dim that colwise sharding splits; None if colwise sharding replicates the parameter."""

    @property
    def rowwise_dim(self) -> int | None:
        """Dim that rowwise sharding splits; None if rowwise sharding replicates the parameter."""

    @property
    def unit_dim(self) -> int | None:
        """Dim that sharding by heads or hidden features splits; None if such sharding replicates the parameter."""

    @property
    def expert_dim(self) -> int | None:
        """Dim that indexes experts; None if the parameter belongs to no expert."""


@frozen_dataclass
class Parallelism:
    """Base class for all kinds of parallelism. Third parties write a subclass, and register code that applies it to a model."""

    tag: ClassVar[str]
    """Name in JSON, on the command line and in reports."""
    axes: ClassVar[tuple[tuple[str, ...], ...]]
    """Alternative sets of mesh axes that the parallelism can use."""

    traceable: ClassVar[bool] = False
    """Whether a step can be traced as one graph, because the parallelism has no hooks."""
    shards_positions: ClassVar[bool] = False
    """Whether ranks along the parallelism's axes hold different positions in the same sequences, so that rows must be sequences.
    """
    shards_experts: ClassVar[bool] = False
    """Whether each rank along the parallelism's axes holds some of a layer's experts or similar units."""

    stage_position: ClassVar[StagePosition | None] = None
    """When the parallelism is applied in a layout with a pipeline, before or after it. None if it cannot be combined with a
    pipeline, because it needs the whole model's forward.
    """
    reduces_each_module: ClassVar[bool] = False
    """Whether each module called by a pipeline schedule reduces its own gradients. No two modules may then share a weight."""

    @property
    def trains_local_tensors(self) -> bool:
        """Whether the parallelism replaces DTensors by their local tensors, so that the optimizer only gets plain tensors."""
        return False

    @property
    def completes_gradients(self) -> bool:
        """Whether hooks that run after gradient accumulation get complete gradients, and can therefore update the parameters."""
        return False

    @property
    def propagates_placements(self) -> bool:
        """Whether activations are DTensors over the parallelism's axes.

        Placements propagate through the model, and the loss is that of the full batch.
        """
        return False

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: ARG002 - used by overriding methods
        """Dim along which the parallelism shards a parameter (chunks like `torch.chunk`). None for a replicated parameter.

        FSDP1's flat parameters also give None, because their shards may begin and end anywhere in a parameter.
        """
        return None

    def axes_of_shards(self, parameter: ParameterFacts, axes: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG002 - of overriding methods
        """Mesh axes whose ranks have different shards of a parameter, in any order.

        `axes` are all axes that the parallelism uses. Several axes together shard one dim. The result may name axes that the mesh
        does not have; `equivcheck.layouts.base.partition.axes_of_shards` drops them.
        """
        return axes[-1:]

    def require_ranks(self, count: int) -> None:
        """Raise `InvalidScenario` if the parallelism cannot use this number of ranks. By default any number is allowed."""
