"""Limits for `torch.distributed.pipelining`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.execution import without_compilation
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.repairs import (
    each_layer,
    only_one,
    with_model,
    with_num_layers,
    with_options,
    with_rows,
    without_frozen,
    without_ties,
)
from equivcheck.layouts.parallelisms.pipeline.recomputation_limits import EXPERTS_TO_RECOMPUTE, RECOMPUTED_ONCE
from equivcheck.layouts.parallelisms.pipeline.stages import (
    defers_reduction,
    has_ddp_stages,
    has_dtensors_in_layers,
    has_replicate_ddp_stages,
    has_weight_of_two_stages,
    num_stages,
    stages_behind_frozen_layers,
)
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AnyLayer,
    LayerPlan,
    Layout,
    Loss,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    PlannedParallelism,
    Replicate,
    StagePosition,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import CP, PP


def _least_layers(layout: Layout) -> int:
    boundaries = parallelism_of(layout, Pipeline).boundaries
    return boundaries[-1] + 1 if boundaries else num_stages(layout)


A_LAYER_FOR_EACH_STAGE = Limit(
    reason="pipeline: a stage without a layer is not supported: each stage needs at least one layer",
    applies=lambda training, layout: len(training.model.layers) < _least_layers(layout),
    repair=lambda training, layout: with_num_layers(training, _least_layers(layout)),
)


def _scales_gradients(layout: Layout) -> bool:
    """Whether the schedule divides gradients by a number of chunks other than one."""
    pipeline = parallelism_of(layout, Pipeline)
    return pipeline.scale_grads and pipeline.num_chunks > 1


def _scales_twice(training: Training, layout: Layout) -> bool:
    """Whether two stages on one rank use the same weight, so that both divide its gradient."""
    return _scales_gradients(layout) and has_weight_of_two_stages(training.model, layout)


SCALED_BY_EACH_STAGE = Limit(
    reason="pipeline: scale_grads with a weight that two stages on one rank share is not supported: each stage divides its "
    "gradient, so it is divided twice",
    applies=_scales_twice,
    repair=lambda training, _layout: without_ties(training),
)


REDUCED_BY_ONE_STAGE = Limit(
    reason="pipeline: a weight that two stages on one rank share is not supported if each stage reduces its own gradients: it "
    "would be reduced twice, or become two parameters",
    applies=lambda training, layout: (
        any(each.reduces_each_module for each in layout.parallelisms) and has_weight_of_two_stages(training.model, layout)
    ),
    repair=lambda training, _layout: without_ties(training),
)


def _row_multiple(layout: Layout) -> int:
    return layout.num_data_ranks * layout.num_chunks


EVEN_CHUNKS = Limit(
    reason="pipeline: a microbatch whose rows are not a multiple of the chunks is not supported: every chunk is received into "
    "a buffer of the first chunk's shape, and only presplit chunks are padded",
    applies=lambda training, layout: (
        not (parallelism_of(layout, Pipeline).presplit or layout.has_equal_chunks(training.data.microbatches))
    ),
    repair=lambda training, layout: with_rows(training, _row_multiple(layout)),
)


A_ROW_FOR_EACH_CHUNK = Limit(
    reason="pipeline: a presplit microbatch with fewer rows than chunks is not supported: a chunk without rows has no mean",
    applies=lambda training, layout: (
        parallelism_of(layout, Pipeline).presplit and min(training.data.microbatches) < _row_multiple(layout)
    ),
    repair=lambda training, layout: _with_at_least(training, _row_multiple(layout)),
)


def _with_at_least(training: Training, rows: int) -> Training:
    microbatches = tuple(max(rows, each) for each in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=microbatches))


NO_CHOICES_OF_PADDING = Limit(
    reason="pipeline: a router's bias or a load-balancing loss with presplit chunks of unlike size is not supported: "
    "padding rows would count for the experts that they choose",
    applies=lambda training, layout: (
        parallelism_of(layout, Pipeline).presplit
        and (training.model.has_router_bias or training.model.balances)
        and not layout.has_equal_chunks(training.data.microbatches)
    ),
    repair=lambda training, layout: with_rows(training, _row_multiple(layout)),
)


NOTHING_BEHIND_FROZEN_LAYERS = UpstreamLimit(
    reason="pipeline: a stage behind frozen layers only is not supported: it has no gradient to send, and torch refuses that",
    applies=lambda training, layout: bool(stages_behind_frozen_layers(training.model, layout)),
    repair=lambda training, _layout: without_frozen(training),
    torch=">=2.12,<2.13",
)

ROWS_FIRST = Limit(
    reason="pipeline: rows along a dim other than 0 are not supported: targets are split into chunks along dim 0, even if "
    "inputs are split along another",
    applies=lambda training, _layout: training.data.batch_dim != 0,
    repair=lambda training, _layout: replace(training, data=replace(training.data, batch_dim=0)),
)

NO_COUNTER = Limit(
    reason="pipeline: a buffer that counts forward passes is not supported: it would count every chunk, and the extra pass in "
    "which torch infers shapes",
    applies=lambda training, _layout: training.model.counter,
    repair=lambda training, _layout: with_model(training, counter=False),
)

NO_LOSS_OF_MICROBATCHES = Limit(
    reason="pipeline: a load-balancing loss over a microbatch is not supported: it depends on all its rows, but "
    "backward of the first chunk may run before the last chunk's forward",
    applies=lambda training, _layout: training.model.balances_microbatches,
    repair=lambda training, _layout: each_layer(training, lambda _index, layer: _balanced_by_sequence(layer)),
)


def _balanced_by_sequence(layer: AnyLayer) -> AnyLayer:
    """Return a layer whose load-balancing loss is computed for each sequence. A layer that cannot do this loses the loss."""
    changed = layer.with_fields(balance_per_sequence=layer.balance > 0)
    return changed if changed.balance_per_sequence or not changed.balance else changed.with_fields(balance=0.0)


NO_LOSS_OF_PARTIAL_SEQUENCES = Limit(
    reason="pipeline: a load-balancing loss under context parallelism is not supported: the loss of a sequence depends on the "
    "positions of other ranks, so each chunk's forward would have to reduce counts",
    applies=lambda training, layout: training.model.balances and layout.mesh.size(CP) > 1,
    repair=lambda training, _layout: each_layer(
        training, lambda _index, layer: layer.with_fields(balance=0.0, balance_per_sequence=False)
    ),
)

ONE_MICROBATCH_SCALED = Limit(
    reason="pipeline: scale_grads with several microbatches of several chunks is not supported: each step() of the schedule "
    "divides by the number of chunks, including gradients accumulated before (torchtitan#1733)",
    applies=lambda training, layout: (
        _scales_gradients(layout) and len(training.data.microbatches) > 1 and not defers_reduction(training, layout)
    ),
    repair=lambda training, _layout: replace(training, data=replace(training.data, microbatches=training.data.microbatches[:1])),
)

MEAN_SCALED = Limit(
    reason="pipeline: scale_grads with a sum loss of several chunks is not supported: scale_grads averages over chunks",
    applies=lambda training, layout: _scales_gradients(layout) and not training.loss.is_mean,
    repair=lambda training, _layout: replace(training, loss=Loss.LINEAR_MEAN if training.loss.is_linear else Loss.MSE_MEAN),
)


def _others(layout: Layout, *positions: StagePosition | None) -> tuple[Parallelism, ...]:
    """Return the other parallelisms applied at one of these positions."""
    return tuple(each for each in layout.parallelisms if not isinstance(each, Pipeline) and each.stage_position in positions)


STAGES_ARE_CALLED = LayoutLimit(
    reason="pipeline: a parallelism that works with the model's forward, such as FullyShardedDataParallel or a batch of "
    "DTensors, is not supported: a schedule calls stages, never the whole model",
    applies=lambda layout: bool(_others(layout, None)),
    repair=lambda layout: only_one(layout, Pipeline, PP),
)


def _in_order(layout: Layout) -> Layout:
    inside, around = _others(layout, StagePosition.INSIDE), _others(layout, StagePosition.AROUND)
    return replace(layout, parallelisms=(*inside, *layout.of(Pipeline), *around))


STAGES_AFTER_LAYERS = LayoutLimit(
    reason="pipeline: tensor, context or expert parallelism applied after it, or data parallelism applied before it, is not "
    "supported: the former must change layers before stages contain them, and data parallelism must wrap the stages",
    applies=lambda layout: not _others(layout, None) and layout != _in_order(layout),
    repair=_in_order,
)

SHAPES_OF_FULL_ACTIVATIONS = LayoutLimit(
    reason="pipeline: static_shapes over tensor parallelism is not supported: stages send the shards that the plan leaves, and "
    "equivcheck knows only the shapes of full activations",
    applies=lambda layout: layout.has(PlannedParallelism) and parallelism_of(layout, Pipeline).static_shapes,
    repair=lambda layout: with_options(layout, Pipeline, static_shapes=False),
)


def _by_fully_shard(layout: Layout) -> Layout:
    parallelisms = tuple(FSDP2() if isinstance(each, DDP | Replicate) else each for each in layout.parallelisms)
    return replace(layout, parallelisms=parallelisms)


GRADIENTS_OF_DTENSORS = LayoutLimit(
    reason="pipeline: DDP, or replicate with DDP's hooks, over parallelize_module is not supported: the first forward infers "
    "shapes in no_grad, and DDP keeps its DTensors, which have no graph, so parameters get no gradients",
    applies=lambda layout: layout.has(TensorParallel) and (has_ddp_stages(layout) or has_replicate_ddp_stages(layout)),
    repair=_by_fully_shard,
    torch="<2.12",
)


def _with_longer_plan(layout: Layout) -> Layout:
    (planned,) = layout.of(PlannedParallelism)
    missing = _least_layers(layout) - len(planned.plan)
    return with_options(layout, type(planned), plan=(*planned.plan, *(LayerPlan(),) * missing))


AN_ENTRY_FOR_EACH_STAGE = LayoutLimit(
    reason="pipeline: a tensor-parallel plan with fewer entries than stages is not supported: each stage needs a layer, and each "
    "layer an entry",
    applies=lambda layout: any(len(each.plan) < _least_layers(layout) for each in layout.of(PlannedParallelism)),
    repair=_with_longer_plan,
)


def _with_plain_messages(layout: Layout) -> Layout:
    return with_options(layout, Pipeline, sends_dtensors=False)


PLACED_MESSAGES = LayoutLimit(
    reason="pipeline: sends_dtensors without parallelize_module is not supported: stages compute plain tensors, which have no "
    "placements",
    applies=lambda layout: parallelism_of(layout, Pipeline).sends_dtensors and not has_dtensors_in_layers(layout),
    repair=_with_plain_messages,
)

MESSAGES_OF_KNOWN_MESHES = LayoutLimit(
    reason="pipeline: sends_dtensors is not supported: PipelineStage has no get_mesh, and passes DTensors to gloo as they are",
    applies=lambda layout: parallelism_of(layout, Pipeline).sends_dtensors,
    repair=_with_plain_messages,
    torch="<2.12",
)

A_CHUNK_FOR_EACH_STAGE = LayoutLimit(
    reason="pipeline: GPipe with fewer chunks than stages is not supported: the schedule needs at least as many chunks as stages",
    applies=lambda layout: (
        parallelism_of(layout, Pipeline).schedule is PipelineSchedule.GPIPE
        and parallelism_of(layout, Pipeline).num_chunks < num_stages(layout)
    ),
    repair=lambda layout: with_options(layout, Pipeline, num_chunks=num_stages(layout)),
    torch="<2.11",
)


def _on_one_rank(layout: Layout) -> Layout:
    axes = tuple(replace(axis, size=1) if axis.name == PP else axis for axis in layout.mesh.axes)
    return replace(with_options(layout, Pipeline, boundaries=()), mesh=replace(layout.mesh, axes=axes))


STAGES_OF_ONE_RANK = LayoutLimit(
    reason="pipeline: stages on several ranks are not supported: they first exchange an int64 tensor that is received as "
    "float32, and gloo aborts",
    applies=lambda layout: layout.mesh.size(PP) > 1,
    repair=_on_one_rank,
    torch="<2.10",
)


def _has_neighbours_on_one_rank(layout: Layout) -> bool:
    pipeline = parallelism_of(layout, Pipeline)
    return pipeline.schedule.is_v or (layout.mesh.size(PP) == 1 and pipeline.stages_per_rank > 1)


NO_NEIGHBOURS_ON_ONE_RANK = LayoutLimit(
    reason="pipeline: neighbouring stages on one rank are not supported: the rank would send to itself, which gloo refuses",
    applies=_has_neighbours_on_one_rank,
    repair=lambda layout: with_options(
        layout, Pipeline, schedule=PipelineSchedule.GPIPE, stages_per_rank=1, boundaries=(), num_chunks=layout.mesh.size(PP)
    ),
    torch="<2.12",
)

NOTHING_COMPILED = LayoutLimit(
    reason="pipeline: torch.compile is not supported: it compiles the model's forward, but a schedule calls stages",
    applies=lambda layout: layout.execution.is_compiled,
    repair=without_compilation,
)


LIMITS: tuple[Limit, ...] = (
    A_LAYER_FOR_EACH_STAGE,
    SCALED_BY_EACH_STAGE,
    REDUCED_BY_ONE_STAGE,
    ONE_MICROBATCH_SCALED,
    MEAN_SCALED,
    ROWS_FIRST,
    EVEN_CHUNKS,
    A_ROW_FOR_EACH_CHUNK,
    NO_CHOICES_OF_PADDING,
    NO_COUNTER,
    NO_LOSS_OF_MICROBATCHES,
    NO_LOSS_OF_PARTIAL_SEQUENCES,
    NOTHING_BEHIND_FROZEN_LAYERS,
    EXPERTS_TO_RECOMPUTE,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    STAGES_ARE_CALLED,
    STAGES_AFTER_LAYERS,
    SHAPES_OF_FULL_ACTIVATIONS,
    GRADIENTS_OF_DTENSORS,
    AN_ENTRY_FOR_EACH_STAGE,
    PLACED_MESSAGES,
    MESSAGES_OF_KNOWN_MESHES,
    NOTHING_COMPILED,
    STAGES_OF_ONE_RANK,
    A_CHUNK_FOR_EACH_STAGE,
    NO_NEIGHBOURS_ON_ONE_RANK,
    RECOMPUTED_ONCE,
)
