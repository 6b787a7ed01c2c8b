"""Predicts how `fully_shard` divides gradient sums: by an averaging reduction, or by a separate division."""

from __future__ import annotations

from equivcheck.layouts.base.dtensor_experts import shards_over_ep
from equivcheck.layouts.base.rounding import Division
from equivcheck.scenario import FSDP2, ElementType, Layout
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD
from equivcheck.system.torch_version import is_torch_in

FACTOR_OF_ALL_RANKS = "<2.10"
"""Versions that average over shards and replicas if the divide factor is the number of all data-parallel ranks.

Later versions average over shards if it is the number of shards, and sum over replicas.
"""


def fully_shard_axes(layout: Layout, *, of_experts: bool = False) -> tuple[str, ...]:
    """Return the axes over which `fully_shard` shards parameters, in units of experts or in other units."""
    return (DP, SHARD, EP) if shards_over_ep(layout) and not of_experts else (DP, SHARD)


def averaging_ranks(layout: Layout, *, of_experts: bool = False) -> int:
    """Return the number of ranks over which `fully_shard` averages gradients, in units of experts or in other units.

    Ranks along another mesh axis are not counted, even if they have different rows.
    """
    return layout.mesh.size(REPLICATE, *fully_shard_axes(layout, of_experts=of_experts))


def hooks_replicas(fsdp: FSDP2, layout: Layout) -> bool:
    """Whether a hook reduces gradients over replicas, so that `fully_shard` itself reduces over the sharding axis only."""
    return fsdp.replica_hook and REPLICATE in layout.mesh.names


def has_expert_groups(fsdp: FSDP2, layout: Layout) -> bool:
    """Whether experts are sharded over all ranks and other parameters over fewer, so that one unit has two parameter groups."""
    return fsdp.experts_on_all_ranks and REPLICATE in layout.mesh.names


def averages(element_type: ElementType) -> bool:
    """Whether the collective itself averages gradients, as for float32 and bfloat16.

    Gradients of other dtypes are divided separately.
    """
    return element_type in (ElementType.FLOAT32, ElementType.BFLOAT16)


def expert_divide_factor(fsdp: FSDP2, layout: Layout) -> float:
    """Return the divide factor for FSDP units of experts.

    It counts the expert-parallel ranks, because experts compute the rows of all these ranks.
    """
    factor = fsdp.gradient_divide_factor or averaging_ranks(layout)
    return factor if shards_over_ep(layout) else factor * layout.mesh.size(EP)


def division_of(fsdp: FSDP2, layout: Layout, element_type: ElementType) -> Division:
    """Return when `fully_shard` divides gradients of this dtype: before the sums over ranks, after them, or both."""
    if not averages(element_type):
        return Division.AROUND
    if fsdp.sum_reductions:
        return Division.LAST
    alone = layout.mesh.size(DP, SHARD) == 1 and fsdp.gradient_divide_factor is not None
    return Division.BEFORE if alone and not is_torch_in(FACTOR_OF_ALL_RANKS) else Division.AFTER


def backend_divides(fsdp: FSDP2, factor: float | None, layout: Layout, *, of_experts: bool = False) -> bool:
    """Whether an averaging collective or a separate operation divides gradients by the divide factor `factor`.

    Otherwise the collective is a premultiplied sum, which includes the division.
    """
    if has_expert_groups(fsdp, layout):  # the experts' gradients are averaged over all ranks, and others over shards
        return factor is None
    if is_torch_in(FACTOR_OF_ALL_RANKS) and not hooks_replicas(fsdp, layout):
        return factor in (None, averaging_ranks(layout, of_experts=of_experts))
    shards = layout.mesh.size(*fully_shard_axes(layout, of_experts=of_experts))
    return shards == 1 or factor in (None, shards)


def reduce_ops(fsdp: FSDP2, layout: Layout, element_type: ElementType, *, of_experts: bool) -> tuple[str, str]:
    """Return the names of the reductions over shards and over replicas, for a unit of experts or another unit."""
    factor = expert_divide_factor(fsdp, layout) if of_experts else fsdp.gradient_divide_factor
    shards = layout.mesh.size(*fully_shard_axes(layout, of_experts=of_experts))
    known_ranks = shards if hooks_replicas(fsdp, layout) else averaging_ranks(layout, of_experts=of_experts)
    if fsdp.sum_reductions or not averages(element_type) or known_ranks == 1:
        return "sum", "sum"
    if hooks_replicas(fsdp, layout):
        return "avg", "sum"
    sums_replicas = factor is not None and not is_torch_in(FACTOR_OF_ALL_RANKS)
    return "avg", "sum" if sums_replicas else "avg"
