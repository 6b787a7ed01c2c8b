"""What an entry of known.toml may ask of a scenario (`needs`) and of its first divergence (`shows`), by name.

To put an issue on file that needs a new one, add a function and its name to one of the two tables at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from equivcheck.layouts.fsdp1 import has_unit_of_nothing
from equivcheck.layouts.limits import keeps_dtensors
from equivcheck.layouts.mends import all_multiples, has_shares, may_skip_parameters
from equivcheck.layouts.plans import cuts, leaves_nothing, splits_weights, trained_cuts, unfrozen_norms
from equivcheck.oracle.known_compile_predicates import (
    compiled_by_inductor,
    compiled_like_shards,
    compiled_original_parameters,
    compiled_units_over_tensor_parallel,
)
from equivcheck.oracle.known_pipeline_predicates import (
    always_splits_backward,
    in_a_stage_behind_frozen_layers,
    rank_of_stages_without_gradients,
    sometimes_splits_backward,
    splits_backward,
    stage_behind_frozen_layers,
    stage_ends_in_view,
)
from equivcheck.oracle.known_spmd_predicates import (
    features_viewed_unevenly,
    flattened_between_transpositions,
    is_sharded_by_rows,
    mean_of_uneven_means,
    one_row_or_feature_on_one_rank,
    outputs_cut_unevenly,
    sharded_by_rows,
    traced_steps,
)
from equivcheck.oracle.verdict import Divergence
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Adafactor,
    Adam,
    ClipNorm,
    ClipValue,
    Implementation,
    Layer,
    LayerPlan,
    Loss,
    Model,
    Norm,
    NormType,
    Precision,
    Replicate,
    Replicator,
    Scenario,
    ShardingStrategy,
    Split,
    Spread,
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


def tensor_parallel_leaves_nothing(scenario: Scenario) -> bool:
    """Tensor parallelism cuts a trained parameter along a dim so short that some rank holds nothing of it."""
    ranks = scenario.layout.mesh.size(TP)
    return any(
        leaves_nothing(size, ranks)
        for parallelism in scenario.layout.parallelisms
        if isinstance(parallelism, TensorParallel)
        for size in trained_cuts(scenario.training.model, parallelism.plan)
    )


def unit_of_nothing(scenario: Scenario) -> bool:
    """FSDP1 over tensor parallelism that leaves some rank no element of a unit."""
    with_fsdp1 = any(isinstance(parallelism, FSDP1) for parallelism in scenario.layout.parallelisms)
    return with_fsdp1 and has_unit_of_nothing(scenario.training, scenario.layout)


def columns_cut_again_unevenly(scenario: Scenario) -> bool:
    """``fully_shard`` cuts the rows of a layer that is cut by columns once more, and not all parts are alike."""
    model, layout = scenario.training.model, scenario.layout
    plans = [parallelism.plan for parallelism in layout.parallelisms if isinstance(parallelism, TensorParallel)]
    parts = layout.mesh.size(DP, SHARD) * layout.mesh.size(TP)
    is_sharded = any(isinstance(parallelism, FSDP2) for parallelism in layout.parallelisms)
    return is_sharded and any(
        entry.split is Split.COLUMN and layer.width % parts
        for plan in plans
        for layer, entry in zip(model.layers, plan, strict=True)
    )


def microbatches_of_several_sizes(scenario: Scenario) -> bool:
    """A later microbatch of a step has another shape than one before it."""
    return len(set(scenario.training.data.microbatches)) > 1


def weights_split_over_ranks(scenario: Scenario) -> bool:
    """Tensor parallelism gives several ranks different parts of some weight."""
    plans = [parallelism.plan for parallelism in scenario.layout.parallelisms if isinstance(parallelism, TensorParallel)]
    return scenario.layout.mesh.size(TP) > 1 and any(map(splits_weights, plans))


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


def frozen_sequence_parallel_norm(scenario: Scenario) -> bool:
    """Tensor parallelism with a frozen norm whose input lies by rows."""
    return bool(unfrozen_norms(scenario.training.model, scenario.layout))


def _replicates_by_fsdp(parallelism: object) -> bool:
    return isinstance(parallelism, Replicate) and parallelism.implementation is Replicator.FSDP


def frozen_over_tensor_parallel(scenario: Scenario) -> bool:
    """A frozen layer under tensor parallelism composed with another parallelism that goes by local tensors."""
    if any(_replicates_by_fsdp(parallelism) for parallelism in scenario.layout.parallelisms):
        return False
    kinds = {type(parallelism) for parallelism in scenario.layout.parallelisms}
    return TensorParallel in kinds and len(kinds) > 1 and any(layer.frozen for layer in scenario.training.model.layers)


def column_of_one_on_one_rank(scenario: Scenario) -> bool:
    """Tensor parallelism on one rank with a column-parallel layer of one output and a trained bias."""
    if scenario.layout.mesh.size(TP) != 1:
        return False
    return any(
        plan.split is Split.COLUMN and layer.width == 1 and layer.bias and not layer.frozen
        for parallelism in scenario.layout.parallelisms
        if isinstance(parallelism, TensorParallel)
        for layer, plan in zip(scenario.training.model.layers, parallelism.plan, strict=True)
    )


def static_graph_without_sync(scenario: Scenario) -> bool:
    """DDP with a static graph whose first backward runs under `no_sync`."""
    return len(scenario.training.data.microbatches) > 1 and any(
        isinstance(parallelism, DDP) and parallelism.static_graph and parallelism.no_sync
        for parallelism in scenario.layout.parallelisms
    )


def unused_parameters_not_looked_for(scenario: Scenario) -> bool:
    """DDP with parameters that take no part in some step, told neither to look for such nor that the graph is static."""
    return may_skip_parameters(scenario.training) and any(map(_looks_for_none, scenario.layout.parallelisms))


def _looks_for_none(parallelism: object) -> bool:
    if isinstance(parallelism, Replicate):
        return parallelism.implementation is Replicator.DDP
    return isinstance(parallelism, DDP) and not (parallelism.find_unused_parameters or parallelism.static_graph)


def shared_weights(scenario: Scenario) -> bool:
    """Some layers share a weight."""
    return has_shares(scenario.training.model)


def activations_cut_unevenly(scenario: Scenario) -> bool:
    """Between two layers of a tensor-parallel plan, rows or features are cut into unequal parts."""
    layout, ranks = scenario.layout, scenario.layout.mesh.size(TP)
    rows = [rows // layout.num_data_ranks for rows in scenario.training.data.microbatches]
    return any(
        not all_multiples(rows if plan.output is Spread.ROWS else [layer.width], ranks)
        for parallelism in layout.parallelisms
        if isinstance(parallelism, TensorParallel)
        for layer, plan in zip(scenario.training.model.layers, parallelism.plan, strict=True)
        if plan.output is not Spread.WHOLE
    )


def rms_norm_after_a_layer(scenario: Scenario) -> bool:
    """An RMSNorm gets what a linear computed."""
    return any(layer.norm is Norm.RMS for layer in scenario.training.model.layers[1:])


def mean_squared_error(scenario: Scenario) -> bool:
    """The loss is the mean squared error."""
    return scenario.training.loss is Loss.MSE_MEAN


def inf_norm(scenario: Scenario) -> bool:
    """Gradients are clipped by their largest element."""
    clipping = scenario.training.clipping
    return isinstance(clipping, ClipNorm) and clipping.norm_type is NormType.INF


def adafactor(scenario: Scenario) -> bool:
    """The optimizer divides by the number of a parameter's elements."""
    return isinstance(scenario.training.optimizer, Adafactor)


def fused_adam(scenario: Scenario) -> bool:
    """The optimizer is Adam or AdamW in its fused implementation."""
    optimizer = scenario.training.optimizer
    return isinstance(optimizer, Adam) and optimizer.implementation is Implementation.FUSED


def clipping_by_value(scenario: Scenario) -> bool:
    """Gradients are clipped element by element."""
    return isinstance(scenario.training.clipping, ClipValue)


def clipping_by_norm(scenario: Scenario) -> bool:
    """Gradients are clipped by a norm."""
    return isinstance(scenario.training.clipping, ClipNorm)


def double_precision(scenario: Scenario) -> bool:
    """Parameters are float64."""
    return scenario.training.precision is Precision.FLOAT64


def several_data_ranks(scenario: Scenario) -> bool:
    """The batch is spread over more than one rank."""
    return scenario.layout.num_data_ranks > 1


def times_data_ranks(scenario: Scenario, divergence: Divergence) -> bool:
    """The value is the expected one times the number of data ranks, to 5 % of what it is off by."""
    expected, actual = float(divergence.expected), float(divergence.actual)
    return abs(actual - scenario.layout.num_data_ranks * expected) <= 0.05 * abs(actual - expected)


def of_a_matrix(_scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor has two dims, so that it can be laid out in more than one way."""
    return len(divergence.index) == 2


def of_a_shared_weight(scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor is a weight that another layer has as well."""
    shared = {layer.shares for layer in scenario.training.model.layers}
    return divergence.tensor in {f"layers.{index}.linear.weight" for index in shared if index is not None}


def norm_of_an_earlier_step(_scenario: Scenario, divergence: Divergence) -> bool:
    """The norm, right at the first step, is too large at a later one."""
    return divergence.step > 0 and divergence.tensor == "norm" and float(divergence.actual) > float(divergence.expected)


def on_frozen_sequence_parallel_norm(scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor is a parameter of a frozen norm whose input lies by rows."""
    match = re.fullmatch(r"layers\.(\d+)\.norm\.(weight|bias)", divergence.tensor)
    return match is not None and int(match[1]) in unfrozen_norms(scenario.training.model, scenario.layout)


def of_a_frozen_layer(scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor is a parameter of a frozen layer."""
    match = re.match(r"layers\.(\d+)\.", divergence.tensor)
    return match is not None and scenario.training.model.layers[int(match[1])].frozen


def _by_name(*functions: Callable[..., bool]) -> dict[str, Callable[..., bool]]:
    return {function.__name__: function for function in functions}


NEEDS: dict[str, Callable[[Scenario], bool]] = _by_name(
    activations_cut_unevenly,
    adafactor,
    always_splits_backward,
    clipping_by_norm,
    clipping_by_value,
    column_of_one_on_one_rank,
    columns_cut_again_unevenly,
    compiled_by_inductor,
    compiled_like_shards,
    compiled_original_parameters,
    compiled_units_over_tensor_parallel,
    double_precision,
    features_viewed_unevenly,
    flattened_between_transpositions,
    frozen_over_tensor_parallel,
    flat_parameter_of_one_element,
    frozen_sequence_parallel_norm,
    fused_adam,
    gradient_has_an_empty_shard,
    inf_norm,
    mean_squared_error,
    microbatches_of_several_sizes,
    one_row_or_feature_on_one_rank,
    outputs_cut_unevenly,
    rank_without_gradients,
    reduces_each_microbatch,
    replicas_of_one_shard,
    rms_norm_after_a_layer,
    several_data_ranks,
    sharded_by_rows,
    shared_weights,
    sometimes_splits_backward,
    splits_backward,
    stage_behind_frozen_layers,
    stage_ends_in_view,
    static_graph_without_sync,
    tensor_parallel_leaves_nothing,
    traced_steps,
    unit_of_nothing,
    unused_parameters_not_looked_for,
    weights_split_over_ranks,
)
"""What an issue may ask of a scenario."""

SHOWS: dict[str, Callable[[Scenario, Divergence], bool]] = _by_name(
    in_a_stage_behind_frozen_layers,
    mean_of_uneven_means,
    norm_of_an_earlier_step,
    of_a_frozen_layer,
    of_a_matrix,
    of_a_shared_weight,
    on_frozen_sequence_parallel_norm,
    times_data_ranks,
)
"""What an issue may ask of the first divergence."""
