"""Limits for `fully_shard`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts
from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS, FSDP_WITHOUT_COMPILED_AUTOGRAD, ROUNDING_LIMITS
from equivcheck.layouts.base.limits.dtensor_values import LIMITS_OF_DTENSOR_VALUES
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import DTENSOR_OPTIMIZERS, WHOLE_PARAMETERS
from equivcheck.layouts.base.limits.repairs import (
    has_frozen,
    has_shares,
    is_tied,
    with_options,
    with_widths,
    without_frozen,
    without_scale,
    without_shares,
    without_tied_head,
)
from equivcheck.layouts.base.partition import is_last_shard_empty, shard_dim
from equivcheck.layouts.base.plan.rules import UNFREEZES, cuts, trained_shard_sizes
from equivcheck.layouts.base.rounding import reduced_in
from equivcheck.layouts.parallelisms.fsdp2.division import averages, backend_divides, expert_divide_factor
from equivcheck.scenario import (
    FSDP2,
    ExpertParallel,
    Layout,
    LocalTensorParallel,
    MeshDims,
    PlannedParallelism,
    Precision,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, SHARD, TP
from equivcheck.training.layers.parameters import Parameter, parameters_of

ONE_UNIT_FOR_SHARED_WEIGHTS = UpstreamLimit(
    reason="fully_shard: one unit per layer with layers that share a weight is not supported: such layers must be in one unit",
    applies=lambda training, layout: parallelism_of(layout, FSDP2).wrapping is Wrapping.PER_LAYER and has_shares(training.model),
    repair=lambda training, _layout: without_shares(training),
)


ONE_UNIT_FOR_TIED_HEAD = UpstreamLimit(
    reason="fully_shard: a unit of the embedding or of the head is not supported if they share a weight: both must be in "
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
    reason="fully_shard over tensor parallelism: a parameter of which some rank holds no element is not supported: its "
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
    reason="fully_shard over tensor parallelism: a frozen linear of which some rank holds no element is not supported: "
    "parallelize_module makes it trainable (pytorch#171523), and its gradient cannot be reduced ('_chunk_cat expects non-empty "
    "tensor')",
    applies=_unfreezes_nothing,
    torch=UNFREEZES,
)

NOTHING_REDUCED = (NOTHING_TO_REDUCE, NOTHING_UNFROZEN_TO_REDUCE)


def cuts_last_dims_unevenly(training: Training, layout: Layout) -> bool:
    """Whether a dim other than the first is sharded unevenly."""
    fsdp, shards = parallelism_of(layout, FSDP2), layout.mesh.size(DP, SHARD)
    found = ((parameter, shard_dim(fsdp, parameter)) for parameter in parameters_of(training.model))
    sizes = ((parameter.shape[dim], shards * _tp_parts(layout, parameter, dim)) for parameter, dim in found if dim)
    return _shards_later_dims(fsdp) and any(size % parts for size, parts in sizes)


def _tp_parts(layout: Layout, parameter: Parameter, dim: int) -> int:
    """Number of tensor-parallel shards along a dim."""
    is_cut = any(shard_dim(parallelism, parameter) == dim for parallelism in layout.of(PlannedParallelism))
    return layout.mesh.size(TP) if is_cut else 1


EVEN_LAST_DIMS = UpstreamLimit(
    reason="fully_shard: uneven shards of a dim other than the first are not supported: shard_placement_fn shards only the "
    "first dim unevenly ('FSDP does not support uneven sharding on dim 1')",
    applies=cuts_last_dims_unevenly,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(DP, SHARD, TP)),
)

CAST_WITH_THEIR_INPUTS = Limit(
    reason="fully_shard: ignored frozen parameters with mixed precision are not supported: they are not cast to the element "
    "type of their inputs",
    applies=lambda training, layout: _casts_inputs(parallelism_of(layout, FSDP2)) and has_frozen(training.model),
    repair=lambda training, _layout: without_frozen(training),
)


def _casts_inputs(fsdp: FSDP2) -> bool:
    return fsdp.ignore_frozen and fsdp.mixed_precision is not None and fsdp.mixed_precision.param is not None


def _multiplies_before_the_sum(layout: Layout) -> bool:
    fsdp = parallelism_of(layout, FSDP2)
    may_average = any(averages(reduced_in(precision, fsdp)) for precision in Precision)
    factors = [fsdp.gradient_divide_factor]
    factors += [expert_divide_factor(fsdp, layout)] if has_dtensor_experts(layout) else []
    return may_average and not fsdp.sum_reductions and not all(backend_divides(fsdp, factor, layout) for factor in factors)


NO_PREMULTIPLIED_SUM = LayoutLimit(
    reason="fully_shard: a gradient_divide_factor other than the number of averaged ranks, such as for DTensor experts, is not "
    "supported without sum_reductions: torch then reduces float32 and bfloat16 gradients by a premultiplied sum, which gloo "
    "lacks",
    applies=_multiplies_before_the_sum,
    repair=lambda layout: with_options(layout, FSDP2, sum_reductions=True),
)


def _without_resharding(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, reshard_to=None)


def _reshards_to_no_part(layout: Layout) -> bool:
    to, shards = parallelism_of(layout, FSDP2).reshard_to, layout.mesh.size(DP, SHARD)
    return to is not None and (shards % to != 0 or shards == to)


RESHARDED_TO_EQUAL_PARTS = LayoutLimit(
    reason="fully_shard: resharding to a number of ranks that is not a smaller divisor of the number of shards is not "
    "supported: parameters are resharded to equal groups of ranks",
    applies=_reshards_to_no_part,
    repair=_without_resharding,
)

RESHARDED_PLAIN_TENSORS = LayoutLimit(
    reason="fully_shard of DTensor parameters: resharding to fewer ranks is not supported: DTensor "
    "parameters cannot be resharded ('Resharding to smaller mesh is not supported for DTensor parameters yet')",
    applies=lambda layout: (
        parallelism_of(layout, FSDP2).reshard_to is not None
        and (layout.has(TensorParallel) or has_dtensor_experts(layout) or layout.propagates_placements)
    ),
    repair=_without_resharding,
)

ONE_GROUP = LayoutLimit(
    reason="fully_shard: a separate group for reductions is not supported: gradients are reduced over the group that gathers "
    "parameters (set_separate_reduce_scatter_group comes with torch 2.13)",
    applies=lambda layout: parallelism_of(layout, FSDP2).separate_reduce_group,
    repair=lambda layout: with_options(layout, FSDP2, separate_reduce_group=False),
    torch="<2.13",
)

OWNERS_OF_SHARDS = LayoutLimit(
    reason="fully_shard over tensor parallelism: distributed Muon is not supported: the owner of a matrix gathers its shards "
    "along one mesh axis, not along two",
    applies=lambda layout: parallelism_of(layout, FSDP2).distributed_muon and layout.has(TensorParallel),
    repair=lambda layout: with_options(layout, FSDP2, distributed_muon=False),
)

LARGEST_DIM_OF_SHARDS = LayoutLimit(
    reason="fully_shard over plain shards of parameters: sharding along the largest dim is not supported: shard_placement_fn "
    "sees a rank's shard, whose largest dim depends on the rank",
    applies=lambda layout: parallelism_of(layout, FSDP2).shard_largest_dim and layout.has(LocalTensorParallel, ExpertParallel),
    repair=lambda layout: with_options(layout, FSDP2, shard_largest_dim=False, shard_last_dim=True),
)

NO_SCALARS = UpstreamLimit(
    reason="fully_shard: a scalar parameter (shape []) is not supported: it has no dim to shard ('fully_shard doesn't support "
    "scalar parameters')",
    applies=lambda training, _layout: training.model.scale,
    repair=lambda training, _layout: without_scale(training),
)


def _without_mesh_dims(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, mesh_dims=None)


HOOK_IN_ONE_PRECISION = LayoutLimit(
    reason="fully_shard: mixed precision with an all-reduce hook is not supported: the hook divides its own sums, and the "
    "single-device run rounds like the reductions of torch only",
    applies=lambda layout: (
        parallelism_of(layout, FSDP2).replica_hook and parallelism_of(layout, FSDP2).mixed_precision is not None
    ),
    repair=lambda layout: with_options(layout, FSDP2, replica_hook=False),
)

NO_MESH_DIMS = LayoutLimit(
    reason="fully_shard: mesh_dims is not supported: fully_shard takes dp_mesh_dims from torch 2.12 on",
    applies=lambda layout: parallelism_of(layout, FSDP2).mesh_dims is not None,
    repair=_without_mesh_dims,
    torch="<2.12",
)

MESH_DIMS_OF_DATA = LayoutLimit(
    reason="fully_shard: mesh_dims together with another parallelism is not supported: parameters must be DTensors on the full "
    "mesh, and other parallelisms make DTensors or shards on their own axes",
    applies=lambda layout: parallelism_of(layout, FSDP2).mesh_dims is not None and len(layout.parallelisms) > 1,
    repair=_without_mesh_dims,
)

REPLICATED_OVER_ONE_AXIS = LayoutLimit(
    reason="fully_shard: MeshDims.REPLICATE on the axes dp_replicate and dp_shard is not supported: dp_shard has to shard",
    applies=lambda layout: parallelism_of(layout, FSDP2).mesh_dims is MeshDims.REPLICATE and SHARD in layout.mesh.names,
    repair=lambda layout: with_options(layout, FSDP2, mesh_dims=MeshDims.SHARD),
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
    CAST_WITH_THEIR_INPUTS,
    *map(_with_mesh_dims, LIMITS_OF_DTENSOR_VALUES),
    *DTENSOR_OPTIMIZERS,
    *WHOLE_PARAMETERS,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    *ROUNDING_LIMITS,
    FSDP_WITHOUT_COMPILED_AUTOGRAD,
    NO_PREMULTIPLIED_SUM,
    RESHARDED_TO_EQUAL_PARTS,
    RESHARDED_PLAIN_TENSORS,
    ONE_GROUP,
    OWNERS_OF_SHARDS,
    LARGEST_DIM_OF_SHARDS,
    HOOK_IN_ONE_PRECISION,
    NO_MESH_DIMS,
    MESH_DIMS_OF_DATA,
    REPLICATED_OVER_ONE_AXIS,
)
