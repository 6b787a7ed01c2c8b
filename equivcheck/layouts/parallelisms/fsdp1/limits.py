"""Limits for `FullyShardedDataParallel`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS, FSDP_WITHOUT_COMPILED_AUTOGRAD, ROUNDING_LIMITS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import with_elementwise_optimizer
from equivcheck.layouts.base.limits.repairs import (
    has_shares,
    has_ties,
    may_skip_parameters,
    with_options,
    with_widths,
    without_auxiliary,
    without_frozen,
    without_scale,
    without_shares,
    without_ties,
)
from equivcheck.layouts.base.plan.rules import UNFREEZES, frozen_shards, has_empty_units, norms_made_trainable, splits_weights
from equivcheck.scenario import (
    FSDP1,
    ClipNorm,
    ClipValue,
    Layout,
    LocalTensorParallel,
    PlannedParallelism,
    Precision,
    ShardingStrategy,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, SHARD, TP
from equivcheck.training.layers.parameters import group_by_layer, parameters_of


def is_sharded(layout: Layout) -> bool:
    """Whether FSDP shards parameters over several ranks."""
    return parallelism_of(layout, FSDP1).strategy is not ShardingStrategy.NO_SHARD and layout.mesh.size(DP, SHARD) > 1


def _clips_float64(training: Training, layout: Layout) -> bool:
    return isinstance(training.clipping, ClipNorm) and training.precision is Precision.FLOAT64 and is_sharded(layout)


NORM_IN_FLOAT32 = UpstreamLimit(
    reason="FullyShardedDataParallel: clip_grad_norm_ of sharded float64 gradients is not supported: it computes the norm in "
    "float32 and refuses float64",
    applies=_clips_float64,
    repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
)

ONE_UNIT_FOR_SHARED_WEIGHTS = Limit(
    reason="FullyShardedDataParallel: one unit per layer with layers that share a weight is not supported: such layers must be "
    "in one unit",
    applies=lambda training, layout: parallelism_of(layout, FSDP1).wrapping is Wrapping.PER_LAYER and has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
)


def _mixes_frozen(training: Training, layout: Layout) -> bool:
    fsdp = parallelism_of(layout, FSDP1)
    if fsdp.use_orig_params:
        return False
    parameters = parameters_of(training.model)
    if fsdp.wrapping is Wrapping.PER_LAYER:
        units = [{parameter.trained for parameter in unit} for unit in group_by_layer(parameters)]
        return any(len(unit) > 1 for unit in units) or bool(norms_made_trainable(training.model, layout))
    return not all(parameter.trained for parameter in parameters)


UNIFORM_FROZEN = UpstreamLimit(
    reason="FullyShardedDataParallel without use_orig_params: a unit with both frozen and trained parameters is not supported: "
    "one flat parameter holds them, and it requires a gradient as a whole or not at all",
    applies=_mixes_frozen,
    repair=lambda training, _layout: without_frozen(training),
)

UNFROZEN_LINEARS = UpstreamLimit(
    reason="FullyShardedDataParallel without use_orig_params: frozen linears under parallelize_module are not supported: they "
    "become trainable (pytorch#171523), and a unit cannot hold both frozen and trained parameters",
    applies=lambda training, layout: (
        not parallelism_of(layout, FSDP1).use_orig_params and bool(frozen_shards(training.model, layout))
    ),
    repair=lambda training, _layout: without_frozen(training),
    torch=UNFREEZES,
)

NO_GROUPS_OF_FLAT_PARAMETERS = Limit(
    reason="FullyShardedDataParallel without use_orig_params: parameter groups are not supported: a flat parameter holds "
    "parameters of several groups",
    applies=lambda training, layout: bool(training.groups) and not parallelism_of(layout, FSDP1).use_orig_params,
    repair=lambda training, _layout: replace(training, groups=()),
)

NO_UNUSED_PARAMETERS = Limit(
    reason="FullyShardedDataParallel: a parameter that takes no part in a step is not supported: it gets a gradient of zeros "
    "instead of None",
    applies=lambda training, _layout: may_skip_parameters(training),
    repair=lambda training, _layout: without_auxiliary(training),
)


def _has_views_of_local_shards(layout: Layout) -> bool:
    return layout.has(TensorParallel) and parallelism_of(layout, FSDP1).use_orig_params


FLAT_UNSHARDED_OVER_TP = LayoutLimit(
    reason="FullyShardedDataParallel over tensor parallelism: use_orig_params without sharding (NO_SHARD, or one rank to shard "
    "over) is not supported: the flat parameter cannot be written back from DTensors (pytorch#119937)",
    applies=lambda layout: _has_views_of_local_shards(layout) and not is_sharded(layout),
    repair=lambda layout: with_options(layout, FSDP1, use_orig_params=False),
)

NO_SYNC_OVER_TP = LayoutLimit(
    reason="FullyShardedDataParallel over tensor parallelism: use_orig_params with no_sync is not supported: unsharded "
    "gradients become DTensors ('invalid python storage')",
    applies=lambda layout: _has_views_of_local_shards(layout) and parallelism_of(layout, FSDP1).no_sync,
    repair=lambda layout: with_options(layout, FSDP1, no_sync=False),
)


def _clips_by_parts(training: Training, layout: Layout) -> bool:
    """Whether gradients are clipped by a norm over different shards on tensor-parallel ranks."""
    if not isinstance(training.clipping, ClipNorm) or layout.mesh.size(TP) == 1:
        return False
    return splits_weights(parallelism_of(layout, PlannedParallelism))


NORM_OF_ALL_SHARDS = UpstreamLimit(
    reason="FullyShardedDataParallel over tensor parallelism: clip_grad_norm_ is not supported: it reduces over the "
    "data-parallel ranks only, so each tensor-parallel rank clips by another norm",
    applies=lambda training, layout: _clips_by_parts(training, layout) and layout.has(TensorParallel),
    repair=lambda training, _layout: replace(training, clipping=_by_value(training)),
)

NORM_OF_FLAT_PARTS = replace(
    NORM_OF_ALL_SHARDS,
    reason="FullyShardedDataParallel over local_tensor_parallel: clip_grad_norm_ is not supported: a flat parameter holds shards "
    "and replicated parameters, and their norms cannot be told apart",
    applies=lambda training, layout: _clips_by_parts(training, layout) and layout.has(LocalTensorParallel),
    upstream=False,
)


def has_unit_of_nothing(training: Training, layout: Layout) -> bool:
    """Whether tensor parallelism leaves a rank no elements for some FSDP1 unit. The unit's flat parameter is then empty."""
    if not layout.has(PlannedParallelism):
        return False
    of_nothing = has_empty_units(training.model, parallelism_of(layout, PlannedParallelism), layout.mesh.size(TP))
    return any(of_nothing) if parallelism_of(layout, FSDP1).wrapping is Wrapping.PER_LAYER else all(of_nothing)


NOTHING_TO_FLATTEN = UpstreamLimit(
    reason="FullyShardedDataParallel over tensor parallelism: a unit without elements on some rank is not supported: the "
    "rank cannot wrap it ('unsharded_start_idx: 0 unsharded_end_idx: -1')",
    applies=has_unit_of_nothing,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
)


def _by_value(training: Training) -> ClipValue:
    assert isinstance(training.clipping, ClipNorm), training.clipping
    return ClipValue(clip_value=training.clipping.max_norm)


ELEMENTWISE_OPTIMIZERS = Limit(
    reason="FullyShardedDataParallel: an optimizer that is not elementwise is not supported with shards or flat parameters: "
    "they do not have the shapes that it needs",
    applies=lambda training, layout: (
        not training.optimizer.elementwise and (is_sharded(layout) or not parallelism_of(layout, FSDP1).use_orig_params)
    ),
    repair=with_elementwise_optimizer,
)


def _keeps_low_precision(training: Training, layout: Layout) -> bool:
    fsdp = parallelism_of(layout, FSDP1)
    if fsdp.mixed_precision is None or fsdp.mixed_precision.param is None or is_sharded(layout):
        return False
    casts = fsdp.mixed_precision.param.value != training.precision.value
    return casts and fsdp.use_orig_params and fsdp.no_sync and len(training.data.microbatches) > 1


NO_SHARES_BETWEEN_MICROBATCHES = UpstreamLimit(
    reason="FullyShardedDataParallel with use_orig_params: no_sync of a shared weight in lower precision is not supported if "
    "nothing is sharded: its gradient cannot be kept in lower precision until the last microbatch ('attempting to assign a "
    "gradient with dtype')",
    applies=lambda training, layout: has_ties(training.model) and _keeps_low_precision(training, layout),
    repair=lambda training, _layout: without_ties(training),
)

NO_SCALARS = UpstreamLimit(
    reason="FullyShardedDataParallel: a scalar parameter (shape []) is not supported: every sharding strategy refuses it "
    "('FSDP doesn't support scalar parameters')",
    applies=lambda training, _layout: training.model.scale,
    repair=lambda training, _layout: without_scale(training),
)

LIMITS: tuple[Limit, ...] = (
    NO_SCALARS,
    EVEN_ROWS,
    NORM_OF_ALL_SHARDS,
    NORM_OF_FLAT_PARTS,
    NOTHING_TO_FLATTEN,
    NORM_IN_FLOAT32,
    ONE_UNIT_FOR_SHARED_WEIGHTS,
    UNIFORM_FROZEN,
    UNFROZEN_LINEARS,
    NO_GROUPS_OF_FLAT_PARAMETERS,
    NO_UNUSED_PARAMETERS,
    NO_SHARES_BETWEEN_MICROBATCHES,
    ELEMENTWISE_OPTIMIZERS,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    *ROUNDING_LIMITS,
    FLAT_UNSHARDED_OVER_TP,
    NO_SYNC_OVER_TP,
    FSDP_WITHOUT_COMPILED_AUTOGRAD,
)
