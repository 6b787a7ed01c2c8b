"""Limits for expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivcheck.layouts.base.dtensor_experts import dtensor_experts, has_dtensor_experts
from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.base.limits.execution import without_compilation
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import (
    DTENSOR_OPTIMIZERS,
    has_units_of_dtensors,
    keeps_dtensors,
    with_elementwise_optimizer,
)
from equivcheck.layouts.base.limits.repairs import only_one, with_equal_experts, with_loop, with_options
from equivcheck.layouts.base.partition import is_last_shard_empty, shard_dim
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP2,
    ExpertParallel,
    ExpertStorage,
    Implementation,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Pipeline,
    Replicate,
    Training,
)
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.parameters import Parameter, parameters_of


def _cuts(training: Training, layout: Layout) -> Iterator[tuple[Parameter, int]]:
    """Yield each parameter sharded over several ranks, with its number of experts."""
    parallelism = parallelism_of(layout, ExpertParallel)
    for parameter in parameters_of(training.model) if layout.mesh.size(EP) > 1 else ():
        dim = shard_dim(parallelism, parameter)
        if dim is not None:
            yield parameter, parameter.shape[dim]


def _updates_parts(training: Training, layout: Layout) -> bool:
    for_context_parallel = [*(parameter for parameter, _ in _cuts(training, layout)), *dtensor_experts(training.model, layout)]
    return not training.optimizer.elementwise and any(parameter.trained for parameter in for_context_parallel)


WHOLE_PARAMETERS = Limit(
    reason="expert parallelism: an optimizer that is not elementwise is not supported: it sees only a rank's own experts, or "
    "it computes norms of DTensors by operations that DTensor does not support",
    applies=_updates_parts,
    repair=with_elementwise_optimizer,
)


def _with_equal_parts(training: Training, layout: Layout) -> Training:
    return with_equal_experts(training, layout.mesh.size(EP))


def _shards_nothing(training: Training, layout: Layout) -> bool:
    return has_units_of_dtensors(layout) and any(
        is_last_shard_empty(count, layout.mesh.size(EP)) for _, count in _cuts(training, layout)
    )


EVERY_RANK_HAS_EXPERTS = Limit(
    reason="fully_shard or replicate_with_fsdp over expert parallelism: a rank without experts is not supported: a gradient "
    "without elements cannot be reduced ('_chunk_cat expects non-empty tensor'), and other ranks wait for the one that raises",
    applies=_shards_nothing,
    repair=_with_equal_parts,
)


def _only_of_experts(limit: Limit) -> Limit:
    """Restrict a DTensor limit to layouts with DTensor experts."""
    return replace(
        limit,
        applies=lambda training, layout: bool(dtensor_experts(training.model, layout)) and limit.applies(training, layout),
    )


def _mixes_tensors_in_one_call(training: Training, layout: Layout) -> bool:
    is_loop = training.optimizer.implementation is Implementation.FOR_LOOP
    if is_loop or not keeps_dtensors(layout) or not dtensor_experts(training.model, layout):
        return False
    # Under what makes all of them DTensors these are of two meshes: only ASGD combines tensors of several parameters then.
    return not has_units_of_dtensors(layout) or isinstance(training.optimizer, ASGD)


NO_MIXED_CALLS = UpstreamLimit(
    reason="expert parallelism with DTensor experts: foreach and fused optimizers are not supported: they refuse plain "
    "parameters and DTensors in one call, and ASGD refuses DTensors of two meshes",
    applies=_mixes_tensors_in_one_call,
    repair=with_loop,
)


def _shifts_buckets(training: Training, layout: Layout) -> bool:
    in_buckets = any(ddp.parameters_as_bucket_view for ddp in layout.of(DDP))
    return in_buckets and any(count % layout.mesh.size(EP) for _, count in _cuts(training, layout))


BUCKETS_OF_EQUAL_PARTS = Limit(
    reason="ZeroRedundancyOptimizer with parameters_as_bucket_view over expert parallelism: unequal numbers of experts on "
    "ranks are not supported: later parameters in the bucket have another alignment on each rank, so BLAS rounds their products "
    "differently, and replicas differ by one ulp",
    applies=_shifts_buckets,
    repair=_with_equal_parts,
)


_AROUND = (ExpertParallel, DDP, Replicate, FSDP2, LocalDataParallel, LocalTensorParallel, Pipeline)

WITHIN_DATA_PARALLELISM = LayoutLimit(
    reason="expert parallelism: other parallelisms than DDP, replicate, fully_shard, local_data_parallel, "
    "local_tensor_parallel and pipelines are not supported together with it: "
    "its average is only right for the gradients that these produce",
    applies=lambda layout: not all(isinstance(each, _AROUND) for each in layout.parallelisms),
    repair=lambda layout: only_one(layout, ExpertParallel, EP),
)

NO_PARTS_OF_DTENSORS = LayoutLimit(
    reason="expert parallelism with DTensor experts: local_tensor_parallel is not supported: it splits plain tensors, not "
    "DTensors that another axis has already sharded",
    applies=lambda layout: layout.has(LocalTensorParallel) and has_dtensor_experts(layout),
    repair=lambda layout: with_options(layout, ExpertParallel, storage=ExpertStorage.PLAIN),
)

EAGER = LayoutLimit(
    reason="expert parallelism: torch.compile is not supported: the number of rows that ranks exchange depends on values, and "
    "a graph cannot hold such shapes",
    applies=lambda layout: layout.execution.is_compiled,
    repair=without_compilation,
)

LIMITS: tuple[Limit, ...] = (
    EVEN_ROWS,
    WHOLE_PARAMETERS,
    EVERY_RANK_HAS_EXPERTS,
    BUCKETS_OF_EQUAL_PARTS,
    *map(_only_of_experts, DTENSOR_OPTIMIZERS),
    NO_MIXED_CALLS,
)
LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (WITHIN_DATA_PARALLELISM, NO_PARTS_OF_DTENSORS, EAGER)
