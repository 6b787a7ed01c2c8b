"""Known-issue predicates for tensor-parallel plans."""

from __future__ import annotations

import re
from collections.abc import Iterator

from equivcheck.layouts.base.dtensor_experts import dtensor_experts
from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.limits.repairs import has_frozen, without_shares
from equivcheck.layouts.base.partition import is_last_shard_empty, shard_dim
from equivcheck.layouts.base.plan.rules import (
    LayerSite,
    cuts,
    frozen_shards,
    has_partial_gradients,
    norms_made_trainable,
    places,
    splits_weights,
)
from equivcheck.scenario import (
    FSDP2,
    SPMD,
    ActivationSharding,
    ClipNorm,
    CrossEntropy,
    IgnoredLabels,
    LayerPlan,
    Parallelism,
    PlannedParallelism,
    Replicate,
    Replicator,
    Scenario,
    Split,
    TensorParallel,
)
from equivcheck.scenario.mesh import DP, EP, SHARD, TP
from equivcheck.training.layers.parameters import Parameter, parameters_of
from equivcheck.worlds.trace.differences import Divergence


@need
def tensor_parallel_leaves_nothing(scenario: Scenario) -> bool:
    """Whether some rank has an empty tensor-parallel shard of a trained parameter."""
    return any(parameter.trained for _, parameter in _cut_to_nothing(scenario))


@need
def fully_shard_reduces(scenario: Scenario) -> bool:
    """Whether `fully_shard`, or `replicate_with_fsdp`, reduces gradients."""
    return any(isinstance(each, FSDP2) or _replicates_by_fsdp(each) for each in scenario.layout.parallelisms)


@need
def fully_shard_manages_no_column(scenario: Scenario) -> bool:
    """Whether `fully_shard` or `replicate_with_fsdp` manages a weight with no tensor-parallel columns on some rank."""
    return any(
        dim > 0 and any(_fully_shards(each, parameter) for each in scenario.layout.parallelisms)
        for dim, parameter in _cut_to_nothing(scenario)
    )


@need
def embedding_by_tokens(scenario: Scenario) -> bool:
    """Whether tensor parallelism shards an embedding along the vocabulary."""
    return any(plan.source is Split.ROWWISE for plan in scenario.layout.of(TensorParallel))


@need
def weighs_ignored_labels_in_parts(scenario: Scenario) -> bool:
    """Whether `loss_parallel` is used with class weights, and some labels may be ignored, such as at the ends of documents."""
    loss, model = scenario.training.loss, scenario.training.model
    weighs = isinstance(loss, CrossEntropy) and loss.class_weights
    ignores = isinstance(loss, CrossEntropy) and (loss.ignored is not IgnoredLabels.NONE or model.packs_documents)
    return weighs and ignores and any(plan.loss_parallel for plan in scenario.layout.of(TensorParallel))


@need
def smooths_labels_in_parts(scenario: Scenario) -> bool:
    """Whether `loss_parallel` is used with label smoothing."""
    loss = scenario.training.loss
    smooths = isinstance(loss, CrossEntropy) and loss.label_smoothing > 0
    return smooths and any(plan.loss_parallel for plan in scenario.layout.of(TensorParallel))


@need
def fully_shard_cuts_columns_of_no_row(scenario: Scenario) -> bool:
    """Whether a weight's tensor-parallel shard has no rows on some rank, and `fully_shard` shards the weight's columns."""
    return any(
        (shard_dim(fsdp, parameter) or 0) > dim
        for dim, parameter in _cut_to_nothing(scenario)
        for fsdp in scenario.layout.of(FSDP2)
    )


def _cut_to_nothing(scenario: Scenario) -> Iterator[tuple[int, Parameter]]:
    """Parameters with an empty shard on some rank, and the sharded dim. Tensor parallelism unties layers."""
    model = without_shares(scenario.training).model
    for plan in scenario.layout.of(PlannedParallelism):
        for parameter in parameters_of(model):
            dim = shard_dim(plan, parameter)
            if dim is not None and is_last_shard_empty(parameter.shape[dim], scenario.layout.mesh.size(TP)):
                yield dim, parameter


def _fully_shards(parallelism: Parallelism, parameter: Parameter) -> bool:
    """Whether `fully_shard` manages a parameter; it does not shard ignored parameters."""
    return _replicates_by_fsdp(parallelism) or (isinstance(parallelism, FSDP2) and shard_dim(parallelism, parameter) is not None)


@need
def clips_norm_of_pending_gradients(scenario: Scenario) -> bool:
    """Whether several ranks clip gradients by their norm, and the gradients may keep partial placements."""
    layout, model = scenario.layout, scenario.training.model
    pends = any(
        not parallelism.redistribute_gradients and has_partial_gradients(model, parallelism)
        for parallelism in layout.of(TensorParallel)
    )
    pends = pends or any(not spmd.redistribute_gradients for spmd in layout.of(SPMD))
    return pends and isinstance(scenario.training.clipping, ClipNorm) and layout.mesh.num_ranks > 1


@need
def columns_cut_again_unevenly(scenario: Scenario) -> bool:
    """Whether `fully_shard` shards parameters unevenly along dim 0, and tensor or expert parallelism also shards this dim."""
    model, layout = scenario.training.model, scenario.layout
    parts = layout.mesh.size(DP, SHARD) * layout.mesh.size(TP, EP)
    rows = [
        size
        for parallelism in layout.of(TensorParallel)
        for parameter, size in cuts(model, parallelism)
        if shard_dim(parallelism, parameter) == 0
    ]
    rows += [parameter.shape[0] for parameter in dtensor_experts(model, layout)]
    return layout.has(FSDP2) and any(size % parts for size in rows)


@need
def weights_split_over_ranks(scenario: Scenario) -> bool:
    """Whether a tensor-parallel plan on DTensors shards some weight over several ranks."""
    return scenario.layout.mesh.size(TP) > 1 and any(map(splits_weights, scenario.layout.of(TensorParallel)))


@need
def plan_splits_weights(scenario: Scenario) -> bool:
    """Whether a tensor-parallel plan, on DTensors or plain tensors, shards some weight over several ranks."""
    return scenario.layout.mesh.size(TP) > 1 and any(map(splits_weights, scenario.layout.of(PlannedParallelism)))


@need
def frozen_sequence_parallel_norm(scenario: Scenario) -> bool:
    """Whether a frozen norm runs on rows that tensor parallelism has sharded."""
    return bool(norms_made_trainable(scenario.training.model, scenario.layout))


@need
def frozen_linear_is_split(scenario: Scenario) -> bool:
    """Whether tensor parallelism shards a frozen linear by columns or rows."""
    return bool(frozen_shards(scenario.training.model, scenario.layout))


def _replicates_by_fsdp(parallelism: object) -> bool:
    return isinstance(parallelism, Replicate) and parallelism.implementation is Replicator.FSDP


@need
def frozen_over_tensor_parallel(scenario: Scenario) -> bool:
    """Whether an outer parallelism replaces a frozen layer's DTensors by local tensors."""
    if any(_replicates_by_fsdp(parallelism) for parallelism in scenario.layout.parallelisms):
        return False
    kinds = {type(parallelism) for parallelism in scenario.layout.parallelisms}
    frozen_experts = [found for found in dtensor_experts(scenario.training.model, scenario.layout) if not found.trained]
    if frozen_experts:
        return not keeps_dtensors(scenario.layout)
    return TensorParallel in kinds and len(kinds) > 1 and has_frozen(scenario.training.model)


@need
def frozen_columns_leave_nothing(scenario: Scenario) -> bool:
    """Whether some rank has no columns of a frozen tensor-parallel layer."""
    model, ranks = scenario.training.model, scenario.layout.mesh.size(TP)
    return any(
        not parameter.trained and (shard_dim(parallelism, parameter) or 0) > 0 and is_last_shard_empty(size, ranks)
        for parallelism in scenario.layout.of(TensorParallel)
        for parameter, size in cuts(model, parallelism)
    )


@need
def trains_local_tensors(scenario: Scenario) -> bool:
    """Whether a parallelism replaces DTensors by local tensors, so that the optimizer may get empty tensors."""
    return not keeps_dtensors(scenario.layout)


@need
def column_of_one_on_one_rank(scenario: Scenario) -> bool:
    """Whether tensor parallelism has only one rank, and shards a bias that has one element and gets a gradient.

    A frozen bias counts too if a parallelism replaces DTensors by local tensors, because it then becomes trainable.
    """
    if scenario.layout.mesh.size(TP) != 1:
        return False
    unfreezes = not keeps_dtensors(scenario.layout)
    return any(
        size == 1 and len(parameter.shape) == 1 and (unfreezes or parameter.trained)
        for parallelism in scenario.layout.of(TensorParallel)
        for parameter, size in cuts(scenario.training.model, parallelism)
    )


@need
def activations_cut_unevenly(scenario: Scenario) -> bool:
    """Whether a tensor-parallel plan shards some layer's input or output, and the shards have unequal sizes."""
    layout, ranks = scenario.layout, scenario.layout.mesh.size(TP)
    rows = layout.rows_of_forwards(scenario.training.data.microbatches)
    found = [
        (place, plan)
        for parallelism in layout.of(TensorParallel)
        for place, plan in zip(places(scenario.training.model, parallelism, ranks, rows), parallelism.plan, strict=True)
    ]
    return any(_is_uneven(place, plan) for place, plan in found)


def _is_uneven(place: LayerSite, plan: LayerPlan) -> bool:
    by_features = plan.output is ActivationSharding.FEATURES and place.width % place.tp != 0
    by_rows = ActivationSharding.ROWS in (place.input, plan.output) and place.has_uneven_rows
    return by_features or by_rows


@show
def on_frozen_sequence_parallel_norm(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent tensor is a parameter in a frozen norm with sharded rows."""
    match = re.fullmatch(r"layers\.(\d+)\.norm\.(weight|bias)", divergence.tensor)
    return match is not None and int(match[1]) in norms_made_trainable(scenario.training.model, scenario.layout)


@show
def of_a_frozen_split_linear(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent tensor is a parameter in a frozen linear sharded by columns or rows."""
    return divergence.tensor in frozen_shards(scenario.training.model, scenario.layout)


@show
def of_a_frozen_layer(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent tensor is frozen in the training, by itself or with its layer.

    A shared weight belongs to the first layer that uses it.
    """
    match, model = re.match(r"layers\.(\d+)\.(linear\.weight$)?", divergence.tensor), scenario.training.model
    if match is None or model.layers[int(match[1])].frozen_base:
        return divergence.tensor in {found.full_name for found in parameters_of(model) if not found.trained}
    layers = model.layers
    layer = layers[int(match[1])]
    return (layer if layer.shares is None or match[2] is None else layers[layer.shares]).frozen
