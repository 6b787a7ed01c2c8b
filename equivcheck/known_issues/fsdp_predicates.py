"""What entries of known.toml ask of fully sharded scenarios: part of the tables of `equivcheck.known_issues.predicates`."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.known_issues.pipeline_predicates import rank_of_stages_without_gradients
from equivcheck.layers.parameters import Parameter, by_layer, parameters_of
from equivcheck.layouts.cuts import is_sharded_by_rows
from equivcheck.layouts.flat_layout import alignment_of, held_of
from equivcheck.layouts.fsdp1 import has_unit_of_nothing
from equivcheck.layouts.limits import keeps_dtensors
from equivcheck.layouts.plans import cuts, leaves_nothing, trained_cuts
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    Compile,
    LayerPlan,
    Scenario,
    ShardingStrategy,
    Split,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP


def gradient_has_an_empty_shard(scenario: Scenario) -> bool:
    """A gradient that is a DTensor is cut along a dim so short that some rank holds nothing of it."""
    return any(leaves_nothing(size, ranks) for size, ranks in _cuts(scenario))


def _cuts(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """The size of each dim along which the gradient of a parameter is cut, and over how many ranks."""
    parameters = [parameter for parameter in parameters_of(scenario.training.model) if parameter.trained]
    mesh = scenario.layout.mesh
    for parallelism in scenario.layout.parallelisms:
        if isinstance(parallelism, TensorParallel):
            yield from ((size, mesh.size(TP)) for size in _cut_with_gradient(scenario, parallelism.plan))
        elif isinstance(parallelism, FSDP2) or is_sharded_by_rows(parallelism):
            yield from ((_fewest_rows(scenario, parameter), mesh.size(DP, SHARD)) for parameter in parameters)


def _cut_with_gradient(scenario: Scenario, plan: tuple[LayerPlan, ...]) -> Iterator[int]:
    """Sizes that tensor parallelism cuts of what gets a gradient: frozen layers too, where their local tensors unfreeze."""
    if keeps_dtensors(scenario.layout):
        yield from trained_cuts(scenario.training.model, plan)
    else:
        yield from (size for _, size in cuts(scenario.training.model, plan))


def _fewest_rows(scenario: Scenario, parameter: Parameter) -> int:
    """The rows, at least one, that tensor parallelism leaves the last rank that has any; all of them without it."""
    rows, ranks = parameter.shape[0], scenario.layout.mesh.size(TP)
    splits = [other.plan[parameter.layer].split for other in scenario.layout.of(TensorParallel)]
    if Split.COLUMN not in splits:
        return rows
    return (rows - 1) % -(-rows // ranks) + 1


def unit_of_nothing(scenario: Scenario) -> bool:
    """FSDP1 over tensor parallelism that leaves some rank no element of a unit."""
    with_fsdp1 = scenario.layout.has(FSDP1)
    return with_fsdp1 and has_unit_of_nothing(scenario.training, scenario.layout)


def rank_without_gradients(scenario: Scenario) -> bool:
    """Some rank of an FSDP1 that keeps original parameters, or of a pipeline, holds no element of a trained one."""
    return rank_of_stages_without_gradients(scenario) or any(
        _some_rank_has_nothing_trained(scenario, parallelism)
        for parallelism in scenario.layout.of(FSDP1)
        if parallelism.use_orig_params and parallelism.strategy is not ShardingStrategy.NO_SHARD
    )


def _some_rank_has_nothing_trained(scenario: Scenario, fsdp: FSDP1) -> bool:
    ranks = scenario.layout.mesh.size(DP, SHARD)
    return not all(any(_trained_on(shard, scenario, fsdp)) for shard in range(ranks))


def _trained_on(shard: int, scenario: Scenario, fsdp: FSDP1) -> Iterator[int]:
    """Elements of each trained parameter that a shard holds."""
    ranks, alignment = scenario.layout.mesh.size(DP, SHARD), alignment_of(scenario.training, fsdp)
    for unit in _units(scenario, fsdp):
        held = held_of([parameter.numel for parameter in unit], alignment, ranks, shard)
        yield from (numel for parameter, numel in zip(unit, held, strict=True) if parameter.trained)


def _units(scenario: Scenario, fsdp: FSDP1) -> list[list[Parameter]]:
    """The parameters of each flat parameter."""
    parameters = parameters_of(scenario.training.model)
    return [list(parameters)] if fsdp.wrapping is Wrapping.WHOLE else by_layer(parameters)


def flat_parameter_of_one_element(scenario: Scenario) -> bool:
    """A sharded FSDP1 without original parameters has a unit with one trained element (on each tensor-parallel rank)."""
    mesh = scenario.layout.mesh
    return mesh.size(DP, SHARD) > 1 and any(
        sum(parameter.numel for parameter in unit) <= mesh.size(TP) and unit[0].trained
        for parallelism in scenario.layout.of(FSDP1)
        if not parallelism.use_orig_params and parallelism.strategy is not ShardingStrategy.NO_SHARD
        for unit in _units(scenario, parallelism)
    )


def compiled_flat_parameter_of_several(scenario: Scenario) -> bool:
    """An FSDP1 without original parameters, compiled as a whole, has a unit of more than one parameter."""
    execution = scenario.layout.execution
    return (
        execution.compile is not Compile.NONE
        and not execution.per_layer
        and any(
            len(unit) > 1
            for parallelism in scenario.layout.of(FSDP1)
            if not parallelism.use_orig_params
            for unit in _units(scenario, parallelism)
        )
    )


def reduces_each_microbatch(scenario: Scenario) -> bool:
    """Gradients are accumulated over several microbatches, each of which is reduced."""
    return len(scenario.training.data.microbatches) > 1 and any(
        not parallelism.no_sync for parallelism in scenario.layout.of(FSDP1)
    )


def replicas_of_one_shard(scenario: Scenario) -> bool:
    """FSDP1 with a hybrid strategy where the axis of shards has one rank and that of replicas several."""
    mesh = scenario.layout.mesh
    hybrid = any(parallelism.strategy.is_hybrid for parallelism in scenario.layout.of(FSDP1))
    return hybrid and mesh.size(SHARD) == 1 and mesh.size(REPLICATE) > 1
