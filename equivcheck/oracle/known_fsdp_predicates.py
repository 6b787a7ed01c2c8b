"""What entries of known.toml ask of fully sharded scenarios: part of the tables of `equivcheck.oracle.known_predicates`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from equivcheck.layouts.fsdp1 import has_unit_of_nothing
from equivcheck.layouts.limits import keeps_dtensors
from equivcheck.layouts.plans import cuts, leaves_nothing, trained_cuts
from equivcheck.oracle.known_pipeline_predicates import rank_of_stages_without_gradients
from equivcheck.oracle.known_spmd_predicates import is_sharded_by_rows
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    Compile,
    Layer,
    LayerPlan,
    Model,
    Norm,
    Precision,
    Scenario,
    ShardingStrategy,
    Split,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP

FLAT_ALIGNMENT = 16
"""Bytes that `FullyShardedDataParallel` aligns original parameters to in a flat one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    layer: int
    shape: tuple[int, ...]
    trained: bool


def _parameters(model: Model) -> Iterator[_Parameter]:
    """Every parameter once, in the order of `named_parameters`."""
    for index, layer in enumerate(model.layers):
        for shape in _shapes(layer, model.inputs(index)):
            yield _Parameter(layer=index, shape=shape, trained=not layer.frozen)


def _shapes(layer: Layer, inputs: int) -> Iterator[tuple[int, ...]]:
    if layer.norm is not None:
        yield (inputs,)
    if layer.norm is Norm.LAYER:
        yield (inputs,)
    if layer.shares is None:
        yield (layer.width, inputs)
    if layer.bias:
        yield (layer.width,)
    if layer.side is not None:
        yield (layer.width, inputs)


def gradient_has_an_empty_shard(scenario: Scenario) -> bool:
    """A gradient that is a DTensor is cut along a dim so short that some rank holds nothing of it."""
    return any(leaves_nothing(size, ranks) for size, ranks in _cuts(scenario))


def _cuts(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """The size of each dim along which the gradient of a parameter is cut, and over how many ranks."""
    parameters = [parameter for parameter in _parameters(scenario.training.model) if parameter.trained]
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


def _fewest_rows(scenario: Scenario, parameter: _Parameter) -> int:
    """The rows, at least one, that tensor parallelism leaves the last rank that has any; all of them without it."""
    rows, ranks = parameter.shape[0], scenario.layout.mesh.size(TP)
    splits = [other.plan[parameter.layer].split for other in scenario.layout.parallelisms if isinstance(other, TensorParallel)]
    if Split.COLUMN not in splits:
        return rows
    return (rows - 1) % -(-rows // ranks) + 1


def unit_of_nothing(scenario: Scenario) -> bool:
    """FSDP1 over tensor parallelism that leaves some rank no element of a unit."""
    with_fsdp1 = any(isinstance(parallelism, FSDP1) for parallelism in scenario.layout.parallelisms)
    return with_fsdp1 and has_unit_of_nothing(scenario.training, scenario.layout)


def rank_without_gradients(scenario: Scenario) -> bool:
    """Some rank of an FSDP1 that keeps original parameters, or of a pipeline, holds no element of a trained one."""
    return rank_of_stages_without_gradients(scenario) or any(
        _some_rank_has_nothing_trained(scenario, parallelism.wrapping)
        for parallelism in scenario.layout.parallelisms
        if isinstance(parallelism, FSDP1)
        and parallelism.use_orig_params
        and parallelism.strategy is not ShardingStrategy.NO_SHARD
    )


def _some_rank_has_nothing_trained(scenario: Scenario, wrapping: Wrapping) -> bool:
    training, ranks = scenario.training, scenario.layout.mesh.size(DP, SHARD)
    parameters = list(_parameters(training.model))
    units = [parameters] if wrapping is Wrapping.WHOLE else _by_layer(parameters)
    alignment = FLAT_ALIGNMENT // (4 if training.precision is Precision.FLOAT32 else 8)
    holders = {rank for unit in units for rank in _holders(unit, ranks, alignment)}
    return len(holders) < ranks


def flat_parameter_of_one_element(scenario: Scenario) -> bool:
    """A sharded FSDP1 without original parameters has a unit with one trained element (on each tensor-parallel rank)."""
    mesh, parameters = scenario.layout.mesh, list(_parameters(scenario.training.model))
    return mesh.size(DP, SHARD) > 1 and any(
        sum(prod(parameter.shape) for parameter in unit) <= mesh.size(TP) and unit[0].trained
        for parallelism in scenario.layout.parallelisms
        if isinstance(parallelism, FSDP1)
        and not parallelism.use_orig_params
        and parallelism.strategy is not ShardingStrategy.NO_SHARD
        for unit in ([parameters] if parallelism.wrapping is Wrapping.WHOLE else _by_layer(parameters))
    )


def compiled_flat_parameter_of_several(scenario: Scenario) -> bool:
    """An FSDP1 without original parameters, compiled as a whole, has a unit of more than one parameter."""
    execution, parameters = scenario.layout.execution, list(_parameters(scenario.training.model))
    return (
        execution.compile is not Compile.NONE
        and not execution.per_layer
        and any(
            len(unit) > 1
            for parallelism in scenario.layout.parallelisms
            if isinstance(parallelism, FSDP1) and not parallelism.use_orig_params
            for unit in ([parameters] if parallelism.wrapping is Wrapping.WHOLE else _by_layer(parameters))
        )
    )


def reduces_each_microbatch(scenario: Scenario) -> bool:
    """Gradients are accumulated over several microbatches, each of which is reduced."""
    return len(scenario.training.data.microbatches) > 1 and any(
        isinstance(parallelism, FSDP1) and not parallelism.no_sync for parallelism in scenario.layout.parallelisms
    )


def _by_layer(parameters: list[_Parameter]) -> list[list[_Parameter]]:
    layers = sorted({parameter.layer for parameter in parameters})
    return [[parameter for parameter in parameters if parameter.layer == layer] for layer in layers]


def _holders(unit: list[_Parameter], ranks: int, alignment: int) -> Iterator[int]:
    """The ranks that hold an element of a trained parameter of a unit, each parameter aligned and all cut evenly."""
    sizes = [prod(parameter.shape) for parameter in unit]
    aligned = [-(-size // alignment) * alignment for size in sizes[:-1]]
    starts = list(accumulate(aligned, initial=0))
    share = -(-(starts[-1] + sizes[-1]) // ranks)
    for parameter, start, size in zip(unit, starts, sizes, strict=True):
        if parameter.trained:
            yield from range(start // share, (start + size - 1) // share + 1)


def replicas_of_one_shard(scenario: Scenario) -> bool:
    """FSDP1 with a hybrid strategy where the axis of shards has one rank and that of replicas several."""
    mesh = scenario.layout.mesh
    hybrid = any(
        isinstance(parallelism, FSDP1) and parallelism.strategy.is_hybrid for parallelism in scenario.layout.parallelisms
    )
    return hybrid and mesh.size(SHARD) == 1 and mesh.size(REPLICATE) > 1
