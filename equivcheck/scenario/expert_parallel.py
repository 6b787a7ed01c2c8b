"""Expert parallelism."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import EP
from equivcheck.scenario.noun import noun
from equivcheck.scenario.parallelism_base import Parallelism, ParameterFacts
from equivcheck.system.choice import Choice


class ExpertStorage(Choice):
    """What a rank's own experts are kept in."""

    PLAIN = "plain"
    """Tensors of these experts alone."""
    DTENSOR = "dtensor"
    """DTensors of all experts, `Shard(0)` along the axis, of which each rank computes with its local tensor."""


@noun
class ExpertParallel(Parallelism):
    """Each rank has rows and experts of its own: rows are sent to the experts that they choose, by all-to-alls, and back.

    Where ranks cannot have equally many experts, the last ones have fewer or none. Everything else is whole on every rank, and
    its gradients are averaged by hand after the last backward; those of experts, which have seen the rows of all ranks, are
    divided by the number of ranks. Data parallelism around it replicates or shards what a rank has, experts included.
    `fully_shard` around DTensors has the experts of each layer as a unit of their own, and divides their gradients itself.
    """

    tag: ClassVar[str] = "expert_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((EP,),)
    shares_units: ClassVar[bool] = True
    storage: ExpertStorage = ExpertStorage.PLAIN
    """What a rank's own experts are kept in."""

    def cut_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: D102 - as inherited
        return parameter.expert_dim
