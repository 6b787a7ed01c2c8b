"""What expert parallelism cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivcheck.layers.parameters import Parameter, parameters_of
from equivcheck.layers.registry import kind_of
from equivcheck.layouts.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.limits.execution import uncompiled
from equivcheck.layouts.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.layouts.limits.optimizers import elementwise
from equivcheck.layouts.limits.repairs import each_layer
from equivcheck.layouts.partition import cut_dim, leaves_nothing
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AnyLayer,
    ExpertParallel,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Replicate,
    Replicator,
    Training,
)
from equivcheck.scenario.mesh import EP


def _cuts(training: Training, layout: Layout) -> Iterator[tuple[Parameter, int]]:
    """What is cut over several ranks, and how many experts it is of."""
    parallelism = parallelism_of(layout, ExpertParallel)
    for parameter in parameters_of(training.model) if layout.mesh.size(EP) > 1 else ():
        dim = cut_dim(parallelism, parameter)
        if dim is not None:
            yield parameter, parameter.shape[dim]


def _updates_parts(training: Training, layout: Layout) -> bool:
    is_cut = any(parameter.trained for parameter, _ in _cuts(training, layout))
    return not training.optimizer.elementwise and is_cut


WHOLE_PARAMETERS = Limit(
    reason="expert parallelism: an optimizer that is not elementwise sees a rank's own experts, a part of a parameter",
    applies=_updates_parts,
    repair=elementwise,
)


def _with_equal_parts(training: Training, layout: Layout) -> Training:
    """As many experts on each rank."""

    def rounded(_index: int, layer: AnyLayer) -> AnyLayer:
        return layer if kind_of(layer).dispatch(layer) is None else layer.rounded(layout.mesh.size(EP))

    return each_layer(training, rounded)


def _shards_nothing(training: Training, layout: Layout) -> bool:
    has_units = layout.has(FSDP2) or any(one.implementation is Replicator.FSDP for one in layout.of(Replicate))
    return has_units and any(leaves_nothing(count, layout.mesh.size(EP)) for _, count in _cuts(training, layout))


EVERY_RANK_HAS_EXPERTS = Limit(
    reason="fully_shard, or replicate_with_fsdp, over expert parallelism: each rank must hold an expert, as a gradient without "
    "elements cannot be reduced ('_chunk_cat expects non-empty tensor'), and other ranks wait for the one that raises",
    applies=_shards_nothing,
    repair=_with_equal_parts,
)


def _shifts_buckets(training: Training, layout: Layout) -> bool:
    in_buckets = any(ddp.parameters_as_bucket_view for ddp in layout.of(DDP))
    return in_buckets and any(count % layout.mesh.size(EP) for _, count in _cuts(training, layout))


BUCKETS_OF_EQUAL_PARTS = Limit(
    reason="ZeroRedundancyOptimizer with parameters_as_bucket_view over expert parallelism: behind unequally many experts a "
    "parameter is aligned otherwise on each rank, BLAS then rounds products of the same values otherwise, and replicas differ "
    "by one ulp",
    applies=_shifts_buckets,
    repair=_with_equal_parts,
)


def _alone(layout: Layout) -> Layout:
    mesh = replace(layout.mesh, axes=tuple(axis for axis in layout.mesh.axes if axis.name == EP))
    return replace(layout, mesh=mesh, parallelisms=(parallelism_of(layout, ExpertParallel),))


_AROUND = (ExpertParallel, DDP, Replicate, FSDP2, LocalDataParallel, LocalTensorParallel)

WITHIN_DATA_PARALLELISM = LayoutLimit(
    reason="expert parallelism: gradients are averaged over its ranks apart from what others do, which is written for what DDP, "
    "replicate, fully_shard, data parallelism by hand and local tensor parallelism leave in `grad`",
    applies=lambda layout: not all(isinstance(each, _AROUND) for each in layout.parallelisms),
    repair=_alone,
)

EAGER = LayoutLimit(
    reason="expert parallelism: how many rows are sent depends on values, and so do shapes, which no graph holds",
    applies=lambda layout: layout.execution.is_compiled,
    repair=uncompiled,
)

LIMITS: tuple[Limit, ...] = (EVEN_ROWS, WHOLE_PARAMETERS, EVERY_RANK_HAS_EXPERTS, BUCKETS_OF_EQUAL_PARTS)
LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (WITHIN_DATA_PARALLELISM, EAGER)
