"""Known-issue predicates for DTensor shards, by `fully_shard`, SPMD or tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equivcheck.layouts.base.dtensor_experts import dtensor_experts, has_dtensor_experts, has_expert_units, is_dtensor_expert
from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.limits.repairs import has_shares
from equivcheck.layouts.base.partition import axes_of_shards, chunk_sizes, is_last_shard_empty, shard_dim
from equivcheck.layouts.base.plan.rules import UNFREEZES
from equivcheck.layouts.base.rounding import Division, reduced_in
from equivcheck.layouts.parallelisms.fsdp2.division import division_of, expert_divide_factor, fully_shard_axes
from equivcheck.layouts.parallelisms.fsdp2.limits import cuts_last_dims_unevenly
from equivcheck.scenario import (
    FSDP2,
    Checkpointing,
    ClipNorm,
    ExpertParallel,
    Layout,
    NormType,
    Parallelism,
    PlannedParallelism,
    Replicate,
    Scenario,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.worlds.trace.differences import Divergence

_EPSILON = 1e-6
"""Epsilon that `clip_grad_norm_` adds to the norm."""
_ROUNDING = 0.01
"""Relative tolerance for a gradient ratio, above float16 rounding."""


@need
def gradient_has_an_empty_shard(scenario: Scenario) -> bool:
    """Whether some rank has an empty shard of a DTensor gradient."""
    return any(is_last_shard_empty(size, ranks) for size, ranks in _cuts(scenario))


@need
def sums_norms_of_shards(scenario: Scenario) -> bool:
    """Whether gradients are clipped by a norm other than infinity, and some gradients are DTensors sharded over several ranks."""
    clipping = scenario.training.clipping
    is_sum = isinstance(clipping, ClipNorm) and clipping.norm_type is not NormType.INF
    return is_sum and any(ranks > 1 for _, ranks in _cuts(scenario))


@show
def off_by_epsilons(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the epsilon in `clip_grad_norm_` can explain why a clipped value is slightly wrong.

    It can if the relative error is at most epsilon / `max_norm`, times the number of ranks.
    """
    clipping, expected = scenario.training.clipping, float(divergence.expected)
    assert isinstance(clipping, ClipNorm), clipping
    largest = scenario.layout.mesh.num_ranks * _EPSILON / clipping.max_norm
    return abs(float(divergence.actual) - expected) <= largest * abs(expected)


def _cuts(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Yield the size and the number of ranks for each sharded gradient dim."""
    layout = scenario.layout
    of_dtensors = [one for one in layout.parallelisms if not isinstance(one, ExpertParallel) or has_dtensor_experts(layout)]
    for parameter in parameters_of(scenario.training.model):
        for parallelism in of_dtensors:
            dim, ranks = shard_dim(parallelism, parameter), layout.mesh.size(*axes_of_shards(layout, parallelism, parameter))
            if dim is not None and _has_gradient(parameter, parallelism, layout):
                is_first = isinstance(parallelism, PlannedParallelism | ExpertParallel)
                yield parameter.shape[dim] if is_first else _fewest(scenario, parameter, dim), ranks


def _has_gradient(parameter: Parameter, parallelism: Parallelism, layout: Layout) -> bool:
    """Whether a parallelism finds a gradient. Tensor parallelism and local tensors give gradients to frozen parameters, too."""
    if any(shard_dim(other, parameter) is not None for other in layout.of(TensorParallel)) and is_torch_in(UNFREEZES):
        return True
    return parameter.trained or (isinstance(parallelism, TensorParallel | ExpertParallel) and not keeps_dtensors(layout))


def _fewest(scenario: Scenario, parameter: Parameter, dim: int) -> int:
    """Return a dim's size on the last rank with elements after tensor or expert parallelism.

    The full size if neither shards it.
    """
    layout = scenario.layout
    for parallelism in layout.of(PlannedParallelism, ExpertParallel):
        if shard_dim(parallelism, parameter) == dim:
            ranks = layout.mesh.size(*layout.axes_of(parallelism))
            return [length for length in chunk_sizes(parameter.shape[dim], ranks) if length][-1]
    return parameter.shape[dim]


@need
def divided_apart_on_one_shard(scenario: Scenario) -> bool:
    """Whether `fully_shard` has one rank along the sharding axis and divides gradient sums in a separate operation."""
    layout, precision = scenario.layout, scenario.training.precision
    return layout.mesh.size(DP, SHARD) == 1 and any(
        any(factor not in (None, 1.0) for factor in _divide_factors(fsdp, scenario))
        and division_of(fsdp, layout, reduced_in(precision, fsdp)) in (Division.AROUND, Division.LAST)
        for fsdp in layout.of(FSDP2)
    )


def _divide_factors(fsdp: FSDP2, scenario: Scenario) -> list[float | None]:
    """Return the divide factors in a model's units. Parameters with several shards do not count."""
    layout, parameters = scenario.layout, parameters_of(scenario.training.model)
    kinds = {is_dtensor_expert(layout, each) for each in parameters if each.trained and not _has_shards(layout, fsdp, each)}
    return [expert_divide_factor(fsdp, layout) if of_experts else fsdp.gradient_divide_factor for of_experts in kinds]


def _has_shards(layout: Layout, fsdp: FSDP2, parameter: Parameter) -> bool:
    return layout.mesh.size(*axes_of_shards(layout, fsdp, parameter)) > 1


@need
def sums_of_head_wait(scenario: Scenario) -> bool:
    """Whether FSDP2 all-reduces over replicas only after the last microbatch, and computes the loss in chunks.

    The gradients of the head's norm layer and of its linear are then reduced separately.
    """
    training, head = scenario.training, scenario.training.model.head
    return (
        len(training.data.microbatches) > 1
        and head is not None
        and head.norm is not None
        and REPLICATE in scenario.layout.mesh.names
        and any(fsdp.loss_chunks > 1 and fsdp.all_reduce_once and not fsdp.no_sync for fsdp in scenario.layout.of(FSDP2))
    )


@need
def one_element_of_head_norm(scenario: Scenario) -> bool:
    """Whether the first rank's shard of the head's norm weight has a single element."""
    ranks = scenario.layout.mesh.size(*fully_shard_axes(scenario.layout))
    return -(-scenario.training.model.in_features(len(scenario.training.model.layers)) // ranks) == 1


@show
def of_the_head(_scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent tensor belongs to the head."""
    return divergence.tensor.startswith("head.")


@need
def weight_in_two_units(scenario: Scenario) -> bool:
    """Whether layers that share a weight are in separate units of `fully_shard`, or of `replicate_with_fsdp`, which calls it."""
    layout = scenario.layout
    wrappings = [fsdp.wrapping for fsdp in layout.of(FSDP2)] + [replicate.wrapping for replicate in layout.of(Replicate)]
    return Wrapping.PER_LAYER in wrappings and has_shares(scenario.training.model)


@need
def fully_shard_in_selective_checkpoints(scenario: Scenario) -> bool:
    """Whether `fully_shard` wraps modules inside a selectively checkpointed layer, which only DTensor experts are."""
    layout = scenario.layout
    is_selective = layout.execution.checkpointing is Checkpointing.SELECTIVE
    return is_selective and has_expert_units(layout) and bool(dtensor_experts(scenario.training.model, layout))


@need
def last_dims_cut_unevenly(scenario: Scenario) -> bool:
    """Whether `fully_shard` splits a parameter along a dim other than the first, into unequal shards."""
    return scenario.layout.has(FSDP2) and cuts_last_dims_unevenly(scenario.training, scenario.layout)


@need
def reshards_last_dims(scenario: Scenario) -> bool:
    """Whether `fully_shard` with `reshard_to` shards a parameter along a dim other than the first."""
    parameters = [parameter for parameter in parameters_of(scenario.training.model) if parameter.trained]
    return any(
        fsdp.reshard_to is not None and any(shard_dim(fsdp, parameter) for parameter in parameters)
        for fsdp in scenario.layout.of(FSDP2)
    )


@show
def divided_once_more(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent gradient has only one shard, and was divided by the divide factor twice."""
    layout, expected, actual = scenario.layout, float(divergence.expected), float(divergence.actual)
    found = [each for each in parameters_of(scenario.training.model) if each.full_name == divergence.tensor]
    return any(
        factor is not None and math.isclose(expected, actual * factor, rel_tol=_ROUNDING)
        for fsdp in layout.of(FSDP2)
        if not any(_has_shards(layout, fsdp, parameter) for parameter in found)
        for factor in _divide_factors(fsdp, scenario)
    )
