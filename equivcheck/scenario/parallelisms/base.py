"""Base class for all kinds of parallelism."""

from __future__ import annotations

from typing import ClassVar, Protocol

from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.system.choice import PrintableEnum


class StagePosition(PrintableEnum):
    """Position at which a parallelism is applied in a layout with a pipeline."""

    INSIDE = "inside"
    """Before the pipeline, because it changes layers, which are then inside a stage."""
    AROUND = "around"
    """After the pipeline, because it changes the called modules, which are then stages."""


class ParameterOwner(PrintableEnum):
    """Model part that owns a parameter."""

    MODEL = "model"
    SOURCE = "source"
    LAYER = "layer"
    HEAD = "head"


class ParameterFacts(Protocol):
    """Properties of a parameter that a parallelism uses."""

    @property
    def owner(self) -> ParameterOwner:
        """Part of the model to which the parameter belongs."""

    @property
    def layer(self) -> int | None:
        """Index of the parameter's layer; None if it is outside all layers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape."""

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
    """Base class for all kinds of parallelism. Third parties subclass it and register a layout for it."""

    tag: ClassVar[str]
    """Name in JSON, on the command line and in reports."""
    axes: ClassVar[tuple[tuple[str, ...], ...]]
    """Alternative sets of mesh axes that the parallelism can use."""

    traceable: ClassVar[bool] = False
    """Whether a step can be traced as one graph because no hooks run outside its operations."""
    shards_positions: ClassVar[bool] = False
    """Whether ranks along the parallelism's axes hold different positions in the same sequences, so that rows must be sequences.
    """
    shards_experts: ClassVar[bool] = False
    """Whether each rank along the parallelism's axes holds some of a layer's experts or similar units."""

    stage_position: ClassVar[StagePosition | None] = None
    """Position in a layout with a pipeline. None if the parallelism works with the model's forward only."""
    reduces_each_module: ClassVar[bool] = False
    """Whether each called module reduces its own gradients, so that no two of them may share a weight."""

    @property
    def trains_local_tensors(self) -> bool:
        """Whether the parallelism replaces DTensors by their local tensors, so that the optimizer only gets plain tensors."""
        return False

    @property
    def propagates_placements(self) -> bool:
        """Whether activations are DTensors over the parallelism's axes.

        Placements propagate through the model, and the loss is that of the full batch.
        """
        return False

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: ARG002 - used by overriding methods
        """Dim along which the parallelism shards a parameter (chunks like `torch.chunk`). None for a replicated parameter.

        Flat parameters do not count because they are split anywhere.
        """
        return None

    def require_ranks(self, count: int) -> None:
        """Raise `InvalidScenario` if the parallelism cannot use this number of ranks. By default any number is allowed."""
