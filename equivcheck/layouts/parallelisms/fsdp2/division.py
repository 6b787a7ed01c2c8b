"""How `fully_shard` divides the sums of gradients: by reductions that average, or apart from them."""

from __future__ import annotations

from equivcheck.layouts.base.rounding import Division
from equivcheck.scenario import FSDP2, ElementType, Layout
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD
from equivcheck.system.torch_version import torch_in

FACTOR_OF_ALL_RANKS = "<2.10"
"""Versions of torch that average over shards and replicas where the divide factor is the number of all ranks.

Later ones average over shards where it is the number of shards, and sum over replicas."""


def averaging_ranks(layout: Layout) -> int:
    """The ranks over which sums are made means; other parallelisms may cut rows over more."""
    return layout.mesh.size(DP, REPLICATE, SHARD)


def averages(element_type: ElementType) -> bool:
    """Whether the backend averages: only in element types that do not overflow easily, else the division is done apart."""
    return element_type in (ElementType.FLOAT32, ElementType.BFLOAT16)


def expert_divide_factor(fsdp: FSDP2, layout: Layout) -> float:
    """The divide factor of units of experts, which have seen the rows of all ranks, also of those along their own axis."""
    return (fsdp.gradient_divide_factor or averaging_ranks(layout)) * layout.mesh.size(EP)


def division_of(fsdp: FSDP2, layout: Layout, element_type: ElementType) -> Division:
    """When sums of gradients of an element type are divided."""
    if not averages(element_type):
        return Division.AROUND
    if fsdp.sum_reductions:
        return Division.LAST
    alone = layout.mesh.size(DP, SHARD) == 1 and fsdp.gradient_divide_factor is not None
    return Division.BEFORE if alone and not torch_in(FACTOR_OF_ALL_RANKS) else Division.AFTER


def backend_divides(factor: float | None, layout: Layout) -> bool:
    """Whether an average, or the division of what is not reduced, is by the divide factor; else it takes a premultiplied sum."""
    if torch_in(FACTOR_OF_ALL_RANKS):
        return factor in (None, averaging_ranks(layout))
    shards = layout.mesh.size(DP, SHARD)
    return shards == 1 or factor in (None, shards)


def reduce_ops(fsdp: FSDP2, layout: Layout, element_type: ElementType, factor: float | None) -> tuple[str, str]:
    """What the reductions over shards and over replicas are called, of a unit with that divide factor."""
    if fsdp.sum_reductions or not averages(element_type) or averaging_ranks(layout) == 1:
        return "sum", "sum"
    sums_replicas = factor is not None and not torch_in(FACTOR_OF_ALL_RANKS)
    return "avg", "sum" if sums_replicas else "avg"
