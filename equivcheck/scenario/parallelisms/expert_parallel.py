"""Expert parallelism: each rank holds a shard of the experts."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import EP
from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.scenario.parallelisms.base import Parallelism, ParameterFacts, StagePosition
from equivcheck.system.choice import PrintableEnum


class ExpertStorage(PrintableEnum):
    """How a rank stores its local experts."""

    PLAIN = "plain"
    """Plain tensors with the local experts only."""
    DTENSOR = "dtensor"
    """DTensors over all experts, placed as `Shard(0)` along the axis; each rank computes with its local tensor."""


@frozen_dataclass
class ExpertParallel(Parallelism):
    """Each rank holds its own rows and its own experts. All-to-alls dispatch rows to experts and bring the results back.

    If the number of experts is not divisible by the number of ranks, the last ranks hold fewer experts or none. All other
    parameters are replicated, and their gradients are averaged explicitly after the last backward. Expert gradients already
    include the rows from all ranks, so they are only divided by the number of ranks. A data parallelism on an outer mesh axis
    replicates or shards the parameters on each rank, experts included. If experts are DTensors, an outer FSDP2 wraps
    the experts of each layer in their own `fully_shard` unit, and divides their gradients instead. With `FSDP2.shard_over_ep`, it
    also shards all other parameters over the expert-parallel ranks, and reduces their gradients.
    """

    tag: ClassVar[str] = "expert_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((EP,),)
    stage_position: ClassVar[StagePosition | None] = StagePosition.INSIDE
    shards_experts: ClassVar[bool] = True
    storage: ExpertStorage = ExpertStorage.PLAIN
    """How a rank stores its local experts."""

    def shard_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        return parameter.expert_dim
