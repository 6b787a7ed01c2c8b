"""Limits for `fully_shard`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.base.limits.dtensor_values import LIMITS_OF_DTENSOR_VALUES
from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import DTENSOR_OPTIMIZERS, WHOLE_PARAMETERS
from equivcheck.layouts.base.limits.repairs import (
    has_frozen,
    has_shares,
    is_tied,
    with_loop,
    with_widths,
    without_frozen,
    without_scale,
    without_shares,
    without_tied_head,
)
from equivcheck.layouts.base.partition import axes_of_shards, is_last_shard_empty, shard_dim
from equivcheck.layouts.base.plan.rules import UNFREEZES, cuts, trained_shard_sizes
from equivcheck.layouts.parallelisms.fsdp2.division import fully_shard_axes, has_expert_groups
from equivcheck.layouts.parallelisms.fsdp2.option_limits import OPTION_LIMITS
from equivcheck.scenario import (
    ASGD,
    FSDP2,
    Implementation,
    Layout,
    PlannedParallelism,
    Precision,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import REPLICATE, TP
from equivcheck.training.layers.parameters import Parameter, parameters_of

ONE_UNIT_FOR_SHARED_WEIGHTS = UpstreamLimit(
    reason="fully_shard: one unit per layer with layers that share a weight is not supported: such layers must be in one unit",
    applies=lambda training, layout: parallelism_of(layout, FSDP2).wrapping is Wrapping.PER_LAYER and has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
)


ONE_UNIT_FOR_TIED_HEAD = UpstreamLimit(
    reason="fully_shard: a separate unit for the embedding or the head is not supported if they share a weight: both must be in "
    "one unit",
    applies=lambda training, layout: (
        (parallelism_of(layout, FSDP2).embedding_unit or parallelism_of(layout, FSDP2).head_unit) and is_tied(training.model)
    ),
    repair=lambda training, _layout: without_tied_head(training),
)


def _some_rank_reduces_nothing(training: Training, layout: Layout) -> bool:
    if not layout.has(PlannedParallelism):
        return False
    tp, ranks = parallelism_of(layout, PlannedParallelism), layout.mesh.size(TP)
    sizes = trained_shard_sizes(training.model, tp)
    if any(_shards_later_dims(fsdp) for fsdp in layout.of(FSDP2)):
        sizes = (size for _, size in cuts(training.model, tp))
    return any(is_last_shard_empty(size, ranks) for size in sizes)


def _shards_later_dims(fsdp: FSDP2) -> bool:
    return fsdp.shard_last_dim or fsdp.shard_largest_dim


NOTHING_TO_REDUCE = UpstreamLimit(
    reason="fully_shard over tensor parallelism: a parameter without elements on some rank is not supported: its "
    "gradient cannot be reduced ('_chunk_cat expects non-empty tensor'), and it cannot be sharded along its last dim ('Shard(1) "
    "requires even sharding')",
    applies=_some_rank_reduces_nothing,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
)


def _unfreezes_nothing(training: Training, layout: Layout) -> bool:
    sizes = (
        size for each in layout.of(TensorParallel) for parameter, size in cuts(training.model, each) if not parameter.trained
    )
    return any(is_last_shard_empty(size, layout.mesh.size(TP)) for size in sizes)


NOTHING_UNFROZEN_TO_REDUCE = replace(
    NOTHING_TO_REDUCE,
    reason="fully_shard over tensor parallelism: a frozen linear without elements on some rank is not supported: "
    "parallelize_module makes it trainable (pytorch#171523), and its gradient cannot be reduced ('_chunk_cat expects non-empty "
    "tensor')",
    applies=_unfreezes_nothing,
    torch=UNFREEZES,
)

NOTHING_REDUCED = (NOTHING_TO_REDUCE, NOTHING_UNFROZEN_TO_REDUCE)


def cuts_last_dims_unevenly(training: Training, layout: Layout) -> bool:
    """Whether `fully_shard` splits a parameter along a dim other than the first, into unequal shards."""
    fsdp = parallelism_of(layout, FSDP2)
    found = ((parameter, shard_dim(fsdp, parameter)) for parameter in parameters_of(training.model))
    sizes = ((parameter.shape[dim], _parts(layout, fsdp, parameter, dim)) for parameter, dim in found if dim)
    return _shards_later_dims(fsdp) and any(size % parts for size, parts in sizes)


def _parts(layout: Layout, fsdp: FSDP2, parameter: Parameter, dim: int) -> int:
    """Return the number of shards along a dim, by tensor parallelism and `fully_shard`."""
    is_cut = any(shard_dim(parallelism, parameter) == dim for parallelism in layout.of(PlannedParallelism))
    return layout.mesh.size(*axes_of_shards(layout, fsdp, parameter), *((TP,) if is_cut else ()))


def _most_shards(layout: Layout) -> int:
    """Return the largest number of shards along a dim."""
    replicas = (REPLICATE,) if parallelism_of(layout, FSDP2).experts_on_all_ranks else ()
    return layout.mesh.size(*fully_shard_axes(layout), *replicas, TP)


EVEN_LAST_DIMS = UpstreamLimit(
    reason="fully_shard: uneven shards of a dim other than the first are not supported: shard_placement_fn shards only the "
    "first dim unevenly ('FSDP does not support uneven sharding on dim 1')",
    applies=cuts_last_dims_unevenly,
    repair=lambda training, layout: with_widths(training, _most_shards(layout)),
)


def _has_two_meshes(training: Training, layout: Layout) -> bool:
    has_experts = any(parameter.expert_dim is not None for parameter in parameters_of(training.model))
    return has_experts and has_expert_groups(parallelism_of(layout, FSDP2), layout)


ASGD_ON_TWO_MESHES = UpstreamLimit(
    reason="fully_shard: experts on a mesh of all ranks with foreach ASGD are not supported: it refuses DTensors of two meshes",
    applies=lambda training, layout: (
        isinstance(training.optimizer, ASGD)
        and training.optimizer.implementation is not Implementation.FOR_LOOP
        and _has_two_meshes(training, layout)
    ),
    repair=with_loop,
)

CAST_WITH_THEIR_INPUTS = Limit(
    reason="fully_shard: ignored frozen parameters with mixed precision are not supported: they are not cast to the element "
    "type of their inputs",
    applies=lambda training, layout: _casts_inputs(parallelism_of(layout, FSDP2)) and has_frozen(training.model),
    repair=lambda training, _layout: without_frozen(training),
)


NORMS_IN_FLOAT32 = Limit(
    reason="fully_shard: norms in full precision are not supported in float64: layer norms on CPU accept inputs in lower "
    "precision only with weights in float32 ('mixed dtype (CPU): expect parameter to have scalar type of Float')",
    applies=lambda training, layout: (
        parallelism_of(layout, FSDP2).full_precision_norms and training.precision is Precision.FLOAT64
    ),
    repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
)


def _casts_inputs(fsdp: FSDP2) -> bool:
    return fsdp.ignore_frozen and fsdp.mixed_precision is not None and fsdp.mixed_precision.param is not None


NO_SCALARS = UpstreamLimit(
    reason="fully_shard: a scalar parameter (shape []) is not supported: it has no dim to shard ('fully_shard doesn't support "
    "scalar parameters')",
    applies=lambda training, _layout: training.model.scale,
    repair=lambda training, _layout: without_scale(training),
)


def _with_mesh_dims(limit: Limit) -> Limit:
    """Restrict a limit to `fully_shard` with DTensor activations."""
    return replace(
        limit,
        applies=lambda training, layout: parallelism_of(layout, FSDP2).mesh_dims is not None and limit.applies(training, layout),
    )


LIMITS: tuple[Limit, ...] = (
    NO_SCALARS,
    EVEN_ROWS,
    ONE_UNIT_FOR_SHARED_WEIGHTS,
    ONE_UNIT_FOR_TIED_HEAD,
    *NOTHING_REDUCED,
    EVEN_LAST_DIMS,
    ASGD_ON_TWO_MESHES,
    CAST_WITH_THEIR_INPUTS,
    NORMS_IN_FLOAT32,
    *map(_with_mesh_dims, LIMITS_OF_DTENSOR_VALUES),
    *DTENSOR_OPTIMIZERS,
    *WHOLE_PARAMETERS,
)

LAYOUT_LIMITS = OPTION_LIMITS
