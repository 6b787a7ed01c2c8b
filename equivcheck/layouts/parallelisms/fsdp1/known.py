"""Known-issue predicates for `FullyShardedDataParallel`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.limits.repairs import is_tied
from equivcheck.layouts.base.partition import local_shape
from equivcheck.layouts.parallelisms.fsdp1.flat_layout import alignment_of, held_of
from equivcheck.layouts.parallelisms.fsdp1.limits import has_unit_of_nothing, is_sharded
from equivcheck.layouts.parallelisms.pipeline.known import rank_of_stages_without_gradients
from equivcheck.scenario import FSDP1, Compile, Scenario, ShardingStrategy, Wrapping
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP
from equivcheck.training.layers.parameters import Parameter, group_by_layer, parameters_of
from equivcheck.worlds.trace.differences import Difference, Divergence

_ROUNDING = 0.01
"""Relative tolerance for a gradient ratio, above float16 rounding."""


@need
def unit_of_nothing(scenario: Scenario) -> bool:
    """Whether FSDP1 over tensor parallelism has a unit without elements on some rank."""
    with_fsdp1 = scenario.layout.has(FSDP1)
    return with_fsdp1 and has_unit_of_nothing(scenario.training, scenario.layout)


@show
def left_unreduced(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergence looks like a missing reduction over replicas.

    Without the reduction, replicas disagree. If their gradients are equal, these are too small: divided by the number of
    replicas.
    """
    if divergence.difference is Difference.RANKS_DISAGREE:
        return True
    replicas = scenario.layout.mesh.size(REPLICATE)
    return math.isclose(float(divergence.actual) * replicas, float(divergence.expected), rel_tol=_ROUNDING)


@need
def unit_of_a_frozen_tie(scenario: Scenario) -> bool:
    """Whether the head is tied to the embedding in a frozen FSDP1 root unit that is not sharded and has `use_orig_params`."""
    uses_originals = any(fsdp.use_orig_params for fsdp in scenario.layout.of(FSDP1))
    return is_tied(scenario.training.model) and uses_originals and outermost_unit_is_frozen(scenario)


@need
def outermost_unit_is_frozen(scenario: Scenario) -> bool:
    """Whether FSDP1's root unit has only frozen parameters and is not sharded, and each layer is a unit."""
    own = [parameter for parameter in parameters_of(scenario.training.model) if parameter.layer is None]
    per_layer = any(fsdp.wrapping is Wrapping.PER_LAYER for fsdp in scenario.layout.of(FSDP1))
    return per_layer and bool(own) and not any(parameter.trained for parameter in own) and not is_sharded(scenario.layout)


@need
def flat_parameters_are_cut(scenario: Scenario) -> bool:
    """Whether FSDP1 shards parameters over several ranks."""
    return scenario.layout.has(FSDP1) and is_sharded(scenario.layout)


@need
def rank_without_gradients(scenario: Scenario) -> bool:
    """Whether some rank has no gradient in some step, under FSDP1 with `use_orig_params` or in a pipeline."""
    return rank_of_stages_without_gradients(scenario) or any(
        _some_rank_has_nothing_trained(scenario, parallelism)
        for parallelism in scenario.layout.of(FSDP1)
        if parallelism.use_orig_params and parallelism.strategy is not ShardingStrategy.NO_SHARD
    )


def _some_rank_has_nothing_trained(scenario: Scenario, fsdp: FSDP1) -> bool:
    mesh = scenario.layout.mesh
    places = product(range(mesh.size(DP, SHARD)), range(mesh.size(TP)))
    return not all(any(_trained_on(shard, part, scenario, fsdp)) for shard, part in places)


def _trained_on(shard: int, part: int, scenario: Scenario, fsdp: FSDP1) -> Iterator[int]:
    """Yield the number of each trained parameter's elements in one shard on one tensor-parallel rank."""
    ranks, alignment = scenario.layout.mesh.size(DP, SHARD), alignment_of(scenario.training, fsdp)
    for unit in _units(scenario, fsdp):
        held = held_of(_numels(scenario, unit, part), alignment, ranks, shard)
        yield from (numel for parameter, numel in zip(unit, held, strict=True) if parameter.trained)


def _numels(scenario: Scenario, unit: list[Parameter], part: int) -> list[int]:
    """Return the number of elements in each unit parameter on one tensor-parallel rank."""
    return [math.prod(local_shape(scenario.layout, parameter, {TP: part})) for parameter in unit]


def _units(scenario: Scenario, fsdp: FSDP1) -> list[list[Parameter]]:
    """Return the parameters in each flat parameter."""
    parameters = parameters_of(scenario.training.model)
    return [list(parameters)] if fsdp.wrapping is Wrapping.ROOT_ONLY else group_by_layer(parameters)


@need
def flat_parameter_of_one_element(scenario: Scenario) -> bool:
    """Whether FSDP1 without use_orig_params has a sharded unit with one trained element on some tensor-parallel rank."""
    mesh = scenario.layout.mesh
    return mesh.size(DP, SHARD) > 1 and any(
        unit[0].trained and any(sum(_numels(scenario, unit, part)) == 1 for part in range(mesh.size(TP)))
        for parallelism in scenario.layout.of(FSDP1)
        if not parallelism.use_orig_params and parallelism.strategy is not ShardingStrategy.NO_SHARD
        for unit in _units(scenario, parallelism)
    )


@need
def compiled_flat_parameter_of_several(scenario: Scenario) -> bool:
    """Whether FSDP1 without use_orig_params has a unit with several parameters, and the whole model is compiled."""
    return any(len(unit) > 1 for parallelism in _compiled_flat(scenario) for unit in _units(scenario, parallelism))


@need
def compiled_flat_shared_weight(scenario: Scenario) -> bool:
    """Whether FSDP1 without use_orig_params wraps a model with a shared weight, and the whole model is compiled."""
    model = scenario.training.model
    is_tied = model.head is not None and model.head.tied
    return bool(_compiled_flat(scenario)) and (is_tied or any(layer.shares is not None for layer in model.layers))


def _compiled_flat(scenario: Scenario) -> list[FSDP1]:
    execution = scenario.layout.execution
    is_compiled = execution.compile is not Compile.NONE and not execution.per_layer
    return [each for each in scenario.layout.of(FSDP1) if is_compiled and not each.use_orig_params]


@need
def reduces_each_microbatch(scenario: Scenario) -> bool:
    """Whether gradients of several microbatches accumulate, and are reduced after each microbatch."""
    return len(scenario.training.data.microbatches) > 1 and any(
        not parallelism.no_sync for parallelism in scenario.layout.of(FSDP1)
    )


@need
def replicas_of_one_shard(scenario: Scenario) -> bool:
    """Whether FSDP1 with a hybrid strategy has one rank along the sharding axis and several replicas."""
    mesh = scenario.layout.mesh
    hybrid = any(parallelism.strategy.is_hybrid for parallelism in scenario.layout.of(FSDP1))
    return hybrid and mesh.size(SHARD) == 1 and mesh.size(REPLICATE) > 1
