"""Limits for `fully_shard` options that exclude each other."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts, shards_over_ep
from equivcheck.layouts.base.limits.data_parallel import FSDP_WITHOUT_COMPILED_AUTOGRAD, ROUNDING_LIMITS
from equivcheck.layouts.base.limits.limit import LayoutLimit, parallelism_of
from equivcheck.layouts.base.limits.repairs import with_options
from equivcheck.layouts.base.rounding import reduced_in
from equivcheck.layouts.parallelisms.fsdp2.division import averages, backend_divides, expert_divide_factor
from equivcheck.scenario import (
    FSDP2,
    ContextParallel,
    ElementType,
    ExpertParallel,
    ExpertStorage,
    Layout,
    LocalTensorParallel,
    MeshDims,
    Pipeline,
    PlannedParallelism,
    Precision,
    TensorParallel,
)
from equivcheck.scenario.mesh import DP, SHARD


def _multiplies_before_the_sum(layout: Layout) -> bool:
    fsdp = parallelism_of(layout, FSDP2)
    may_average = any(averages(reduced_in(precision, fsdp)) for precision in Precision)
    divides = backend_divides(fsdp, fsdp.gradient_divide_factor, layout)
    if has_dtensor_experts(layout):
        divides = divides and backend_divides(fsdp, expert_divide_factor(fsdp, layout), layout, of_experts=True)
    return may_average and not fsdp.sum_reductions and not divides


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
    reason="fully_shard over tensor parallelism or with shard_over_ep: distributed Muon is not supported: the owner of a matrix "
    "gathers its shards along one mesh axis, not along two",
    applies=lambda layout: (
        parallelism_of(layout, FSDP2).distributed_muon and (layout.has(TensorParallel) or shards_over_ep(layout))
    ),
    repair=lambda layout: with_options(layout, FSDP2, distributed_muon=False),
)

LARGEST_DIM_OF_SHARDS = LayoutLimit(
    reason="fully_shard over plain shards of parameters: sharding along the largest dim is not supported: shard_placement_fn "
    "sees a rank's shard, whose largest dim depends on the rank",
    applies=lambda layout: parallelism_of(layout, FSDP2).shard_largest_dim and layout.has(LocalTensorParallel, ExpertParallel),
    repair=lambda layout: with_options(layout, FSDP2, shard_largest_dim=False, shard_last_dim=True),
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


def _keeps_norms(layout: Layout) -> bool:
    return parallelism_of(layout, FSDP2).full_precision_norms


def _casts_to_wide_or_nothing(layout: Layout) -> bool:
    policy = parallelism_of(layout, FSDP2).mixed_precision
    return policy is None or policy.param not in (ElementType.BFLOAT16, ElementType.FLOAT16)


def _with_cast_norms(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, full_precision_norms=False)


PRECISION_OF_NORMS = (
    LayoutLimit(
        reason="fully_shard: norms in full precision are not supported: before torch 2.15, MixedPrecisionPolicy has no "
        "param_dtype_override_fn",
        applies=_keeps_norms,
        repair=_with_cast_norms,
        torch="<2.15",
    ),
    LayoutLimit(
        reason="fully_shard: norms in full precision without bfloat16 or float16 for other parameters are not supported: nothing "
        "is cast, or layer norms refuse inputs that are wider than their weights",
        applies=lambda layout: _keeps_norms(layout) and _casts_to_wide_or_nothing(layout),
        repair=_with_cast_norms,
    ),
)


def _in_chunks(layout: Layout) -> bool:
    return parallelism_of(layout, FSDP2).loss_chunks > 1


def _without_chunks(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, loss_chunks=1)


CHUNKS = (
    LayoutLimit(
        reason="fully_shard: a head that is called in chunks is not supported: before torch 2.13, the modules of a unit cannot "
        "be called separately",
        applies=_in_chunks,
        repair=_without_chunks,
        torch="<2.13",
    ),
    LayoutLimit(
        reason="fully_shard over tensor, context or pipeline parallelism: a head in chunks is not supported: these parallelisms "
        "compute the loss from shards of tokens or positions, or in the last stage",
        applies=lambda layout: _in_chunks(layout) and layout.has(PlannedParallelism, ContextParallel, Pipeline),
        repair=_without_chunks,
    ),
    LayoutLimit(
        reason="fully_shard: a head in chunks with mixed precision or compilation is not supported: the model ends before the "
        "head, so casts of its output and compiled graphs differ",
        applies=lambda layout: (
            _in_chunks(layout) and (layout.execution.is_compiled or parallelism_of(layout, FSDP2).mixed_precision is not None)
        ),
        repair=_without_chunks,
    ),
)


def _without_expert_mesh(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, experts_on_all_ranks=False)


def _has_expert_mesh(layout: Layout) -> bool:
    return parallelism_of(layout, FSDP2).experts_on_all_ranks


EXPERT_MESH = (
    LayoutLimit(
        reason="fully_shard: experts on a mesh of all ranks are not supported: before torch 2.12, shard_placement_fn cannot "
        "return a mesh (ShardPlacementResult)",
        applies=_has_expert_mesh,
        repair=_without_expert_mesh,
        torch="<2.12",
    ),
    LayoutLimit(
        reason="fully_shard together with another parallelism: experts on a mesh of all ranks are not supported: along the "
        "axes of the other parallelism, ranks have different experts, layers or positions",
        applies=lambda layout: _has_expert_mesh(layout) and len(layout.parallelisms) > 1,
        repair=_without_expert_mesh,
    ),
    LayoutLimit(
        reason="fully_shard: experts on a mesh of all ranks with mesh_dims are not supported: a parameter that is a DTensor "
        "before fully_shard is sharded over axes of its own mesh",
        applies=lambda layout: _has_expert_mesh(layout) and parallelism_of(layout, FSDP2).mesh_dims is not None,
        repair=_without_expert_mesh,
    ),
    LayoutLimit(
        reason="fully_shard: experts on a mesh of all ranks with an all-reduce hook are not supported: modules with two "
        "parameter groups accept no hook (set_all_reduce_hook)",
        applies=lambda layout: _has_expert_mesh(layout) and parallelism_of(layout, FSDP2).replica_hook,
        repair=_without_expert_mesh,
    ),
    LayoutLimit(
        reason="fully_shard: experts on a mesh of all ranks with mixed precision are not supported: their gradients are reduced "
        "in one step, but the single-device run rounds all gradients as in HSDP, first over shards, then over replicas",
        applies=lambda layout: _has_expert_mesh(layout) and parallelism_of(layout, FSDP2).mixed_precision is not None,
        repair=_without_expert_mesh,
    ),
)


def _without_shard_over_ep(layout: Layout) -> Layout:
    return with_options(layout, FSDP2, shard_over_ep=False)


SHARD_OVER_EP = (
    LayoutLimit(
        reason="fully_shard with shard_over_ep: local_tensor_parallel is not supported: it splits plain tensors, but "
        "experts must be DTensors",
        applies=lambda layout: shards_over_ep(layout) and layout.has(LocalTensorParallel),
        repair=_without_shard_over_ep,
    ),
    LayoutLimit(
        reason="fully_shard with shard_over_ep: experts as plain tensors are not supported: fully_shard would shard each rank's "
        "own experts over ranks with other experts",
        applies=lambda layout: shards_over_ep(layout) and not has_dtensor_experts(layout),
        repair=lambda layout: with_options(layout, ExpertParallel, storage=ExpertStorage.DTENSOR),
    ),
)

NO_MESH_DIMS = LayoutLimit(
    reason="fully_shard: mesh_dims is not supported: before torch 2.12, fully_shard has no argument dp_mesh_dims",
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
    reason="fully_shard: MeshDims.REPLICATE on the axes dp_replicate and dp_shard is not supported: parameters must be sharded "
    "along dp_shard",
    applies=lambda layout: parallelism_of(layout, FSDP2).mesh_dims is MeshDims.REPLICATE and SHARD in layout.mesh.names,
    repair=lambda layout: with_options(layout, FSDP2, mesh_dims=MeshDims.SHARD),
)


def _needs_shards(situation: str, consequence: str, *options: str) -> LayoutLimit:
    """Options that MeshDims.REPLICATE, which has no axis that shards, cannot have."""

    def applies(layout: Layout) -> bool:
        fsdp = parallelism_of(layout, FSDP2)
        return fsdp.mesh_dims is MeshDims.REPLICATE and any(getattr(fsdp, option) for option in options)

    return LayoutLimit(
        reason=f"fully_shard: {situation} with MeshDims.REPLICATE is not supported: {consequence}",
        applies=applies,
        repair=lambda layout: with_options(layout, FSDP2, **dict.fromkeys(options, False)),
    )


NEED_SHARDS = (
    _needs_shards(
        "shard_placement_fn",
        "torch requires an axis that shards ('shard_placement_fn is not supported with DDPMeshInfo')",
        "shard_last_dim",
        "shard_largest_dim",
    ),
    _needs_shards(
        "set_separate_reduce_scatter_group",
        "torch requires an axis that shards ('Expected mesh_info to be FSDPMeshInfo')",
        "separate_reduce_group",
    ),
    _needs_shards(
        "distributed Muon",
        "the owner of a matrix gathers its shards, and replicated parameters have none",
        "distributed_muon",
    ),
)

OPTION_LIMITS: tuple[LayoutLimit, ...] = (
    *ROUNDING_LIMITS,
    FSDP_WITHOUT_COMPILED_AUTOGRAD,
    NO_PREMULTIPLIED_SUM,
    RESHARDED_TO_EQUAL_PARTS,
    RESHARDED_PLAIN_TENSORS,
    ONE_GROUP,
    OWNERS_OF_SHARDS,
    LARGEST_DIM_OF_SHARDS,
    HOOK_IN_ONE_PRECISION,
    *PRECISION_OF_NORMS,
    *CHUNKS,
    *EXPERT_MESH,
    *SHARD_OVER_EP,
    NO_MESH_DIMS,
    MESH_DIMS_OF_DATA,
    REPLICATED_OVER_ONE_AXIS,
    *NEED_SHARDS,
)
