"""Limits for layer kinds under any parallelism, because shapes or routing depend on values."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import Limit
from equivcheck.layouts.base.limits.repairs import each_layer, with_model, without_router_bias
from equivcheck.layouts.base.partition import chunk_sizes, is_last_shard_empty
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.scenario import (
    AnyLayer,
    Attention,
    AttentionExchange,
    ContextParallel,
    Experts,
    Layout,
    PlannedParallelism,
    Split,
    Training,
)
from equivcheck.scenario.mesh import CP, TP
from equivcheck.training.layers.registry import layer_kind


def _with_known_shapes(_index: int, layer: AnyLayer) -> AnyLayer:
    return layer_kind(layer).with_known_shapes(layer)


def _has_shapes_of_values(training: Training, layout: Layout) -> bool:
    makes_graphs = layout.execution.is_compiled or layout.execution.whole_step
    return makes_graphs and any(_with_known_shapes(0, layer) != layer for layer in training.model.layers)


def _without_choices(_index: int, layer: AnyLayer) -> AnyLayer:
    return layer if isinstance(layer, Experts) and layer.chooses_all else layer.without_routing()


def _without_recomputed_routes(training: Training, layout: Layout) -> Training:
    return each_layer(training, lambda index, layer: layer.without_routing() if layout.execution.checkpoints(index) else layer)


def _some_rank_has_no(heads: int, layout: Layout, index: int) -> bool:
    """Whether a split by heads, or an exchange of positions for heads, leaves some rank without heads."""
    entries = (entry for each in layout.of(PlannedParallelism) for entry in each.plan[index : index + 1])
    parts = layout.mesh.size(TP) if any(entry.split is Split.HEADS_OR_HIDDEN for entry in entries) else 1
    by_heads = any(each.exchange is AttentionExchange.ULYSSES for each in layout.of(ContextParallel))
    ranks = layout.mesh.size(CP) if by_heads else 1
    return any(is_last_shard_empty(part, ranks) for part in chunk_sizes(heads, parts))


def _with_one_prediction(training: Training, _layout: Layout) -> Training:
    head = training.model.head
    return with_model(training, head=head and replace(head, predicts_two=False))


def _shards_classes(layout: Layout) -> bool:
    return any(plan.loss_parallel or plan.head is Split.COLWISE for plan in layout.of(PlannedParallelism))


LAYER_LIMITS = (
    Limit(
        reason="a head that predicts two tokens: a plan that shards its classes is not supported: the weight has the rows of "
        "both predictions one after the other, so a rank would have classes of one prediction only",
        applies=lambda training, layout: training.model.predicts_two and _shards_classes(layout),
        repair=_with_one_prediction,
    ),
    Limit(
        reason="a head that predicts two tokens: DTensor activations are not supported: its output may be sharded by features, "
        "and DTensor cannot view such a dim as two",
        applies=lambda training, layout: training.model.predicts_two and layout.propagates_placements,
        repair=_with_one_prediction,
    ),
    Limit(
        reason="fused attention on CPU: a rank without heads is not supported: the kernel divides by zero, which ends the "
        "process (SIGFPE)",
        applies=lambda training, layout: any(
            isinstance(layer, Attention) and layer.fused and _some_rank_has_no(layer.num_kv_heads, layout, index)
            for index, layer in enumerate(training.model.layers)
        ),
        repair=lambda training, _layout: each_layer(
            training, lambda _index, layer: layer.with_fields(fused=False) if isinstance(layer, Attention) else layer
        ),
        torch="<2.12",
    ),
    Limit(
        reason="torch.compile or whole_step: shapes that depend on values, such as the number of positions routed to an expert, "
        "are not supported: a graph cannot hold them",
        applies=_has_shapes_of_values,
        repair=lambda training, _layout: each_layer(training, _with_known_shapes),
    ),
    Limit(
        reason="whole_step: a router's bias that is updated once a step is not supported: the traced graph takes buffers, but "
        "returns neither buffers nor the counts of chosen experts",
        applies=lambda training, layout: training.model.has_router_bias and layout.execution.whole_step,
        repair=lambda training, _layout: without_router_bias(training),
    ),
    Limit(
        reason="experts with a router: a layout that rounds to other element types is not supported: rounded scores are often "
        "equal, so ranks may choose other experts than the single-device run",
        applies=lambda training, layout: (
            each_layer(training, _without_choices) != training and rounding_of(layout, training.precision) is not None
        ),
        repair=lambda training, _layout: each_layer(training, _without_choices),
    ),
    Limit(
        reason="compiled autograd: recomputing a layer of experts is not supported: each expert breaks the graph; compiling "
        "takes 0.5 min with two experts, 2 min with four, and does not finish with eight",
        applies=lambda training, layout: (
            layout.execution.compiled_autograd and _without_recomputed_routes(training, layout) != training
        ),
        repair=_without_recomputed_routes,
    ),
)
"""Limits that are checked before the parallelisms' limits."""
