"""Sharded gradients reduced wrongly over shards or replicas."""

from __future__ import annotations

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, has_data_ranks, is_eager
from equivcheck.mutants.rank import axis_names, data_ranks, mesh_of, scale_gradients, size_of
from equivcheck.mutants.torch_private import TakeNextChunk, TakeOwnChunk, forget_replicas, fsdp_modules, reduce_scatter_with
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.training.setup import Setup

FULLY_SHARDED = ("fsdp2", "fsdp2 x tensor_parallel")
"""Layouts with `fully_shard`."""


def num_shards(scenario: Scenario) -> int:
    """Return the number of ranks over which a scenario shards parameters."""
    return scenario.layout.mesh.size(DP, SHARD)


def is_sharded(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and parameters are sharded over several ranks."""
    return is_eager(scenario) and num_shards(scenario) > 1


def _replicates_shards(scenario: Scenario) -> bool:
    return is_eager(scenario) and scenario.layout.mesh.size(REPLICATE) > 1


def _shards_replicas(scenario: Scenario) -> bool:
    return REPLICATE in scenario.layout.mesh.names and is_sharded(scenario)


@fault(layouts=FULLY_SHARDED, applies=has_data_ranks, causes=(Cause.SUMMED, Cause.SCALED))
def reduce_scatter_sums(setup: Setup) -> None:
    """Bug: reduce-scatter sums gradients, but does not divide them by the number of ranks."""
    for module in fsdp_modules(setup):
        module.set_gradient_divide_factor(1.0)


@fault(layouts=("fsdp1", "fsdp1 x tensor_parallel"), applies=has_data_ranks, causes=(Cause.SUMMED, Cause.SCALED))
def flat_gradients_summed(setup: Setup) -> None:
    """Bug: flat gradients are summed over ranks, but not divided by their number."""
    scale_gradients(setup, data_ranks(setup))


@fault(layouts=FULLY_SHARDED, applies=is_sharded, causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART))
def reduce_scatter_missing(setup: Setup) -> None:
    """Bug: each rank keeps its chunk from its own gradients, without a reduction over shards."""
    reduce_scatter_with(setup, TakeOwnChunk)


@fault(layouts=FULLY_SHARDED, applies=is_sharded, causes=(Cause.STATE_OF_ANOTHER, Cause.PERMUTED))
def reduce_scatter_shifted(setup: Setup) -> None:
    """Bug: each rank gets the next rank's chunk from the reduce-scatter."""
    reduce_scatter_with(setup, TakeNextChunk)


@fault(layouts=("fsdp2",), applies=_replicates_shards, causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED))
def replicas_not_reduced(setup: Setup) -> None:
    """Bug: gradients are reduced over shards, but not over replicas."""
    if REPLICATE in axis_names(setup):
        for module in fsdp_modules(setup):
            forget_replicas(module, mesh_of(setup)[SHARD])


@fault(layouts=("fsdp2",), applies=_replicates_shards, causes=(Cause.SUMMED, Cause.SCALED))
def divided_by_shards_only(setup: Setup) -> None:
    """Bug: gradients are summed over shards and replicas, but divided by the number of shards only."""
    scale_gradients(setup, size_of(setup, REPLICATE))


@fault(
    layouts=("fsdp1",),
    applies=all_of(_replicates_shards, is_sharded),
    causes=(Cause.SUMMED, Cause.SCALED),
    minimum=Minimum(ranks=4, because="it takes two replicas with two shards each, because one shard each is a known issue"),
)
def flat_divided_by_shards_only(setup: Setup) -> None:
    """Bug: flat gradients are summed over shards and replicas, but divided by the number of shards only."""
    scale_gradients(setup, size_of(setup, REPLICATE))


@fault(layouts=("fsdp2", "fsdp1"), applies=_shards_replicas, causes=(Cause.SUMMED, Cause.SCALED))
def divided_by_replicas_only(setup: Setup) -> None:
    """Bug: gradients are summed over shards and replicas, but divided by the number of replicas only."""
    scale_gradients(setup, size_of(setup, SHARD))
