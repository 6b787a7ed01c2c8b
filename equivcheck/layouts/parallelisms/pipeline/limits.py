"""What `torch.distributed.pipelining` cannot run."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.execution import uncompiled
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.layouts.base.limits.repairs import (
    all_multiples,
    each_layer,
    with_model,
    with_num_layers,
    with_options,
    with_rows,
    without_frozen,
    without_ties,
)
from equivcheck.layouts.parallelisms.pipeline.stages import (
    num_stages,
    rank_of_stages,
    stages_behind_frozen_layers,
    uses_of_weights,
)
from equivcheck.scenario import Layout, Loss, Pipeline, PipelineSchedule, Training
from equivcheck.scenario.mesh import PP


def _least_layers(layout: Layout) -> int:
    boundaries = parallelism_of(layout, Pipeline).boundaries
    return boundaries[-1] + 1 if boundaries else num_stages(layout)


A_LAYER_FOR_EACH_STAGE = Limit(
    reason="pipeline: each stage needs at least one layer",
    applies=lambda training, layout: len(training.model.layers) < _least_layers(layout),
    repair=lambda training, layout: with_num_layers(training, _least_layers(layout)),
)


def _scales_twice(training: Training, layout: Layout) -> bool:
    """Whether two stages of one rank have a weight, and both divide its gradient."""
    pipeline, ranks = parallelism_of(layout, Pipeline), layout.mesh.size(PP)
    if not pipeline.scale_grads or pipeline.num_chunks == 1:
        return False
    rank_of = rank_of_stages(pipeline, ranks)
    users = ({stage for _, stage in uses} for uses in uses_of_weights(training.model, pipeline, ranks))
    return any(len(stages) > len({rank_of[stage] for stage in stages}) for stages in users)


SCALED_BY_EACH_STAGE = Limit(
    reason="pipeline: scale_grads divides the gradients of each stage, that of a weight of two stages of one rank twice",
    applies=_scales_twice,
    repair=lambda training, _layout: without_ties(training),
)


def _row_multiple(layout: Layout) -> int:
    return layout.num_data_ranks * parallelism_of(layout, Pipeline).num_chunks


EVEN_CHUNKS = Limit(
    reason="pipeline: every chunk is received into a buffer of the first one's shape, so rows must be a multiple of the chunks",
    applies=lambda training, layout: not all_multiples(training.data.microbatches, _row_multiple(layout)),
    repair=lambda training, layout: with_rows(training, _row_multiple(layout)),
)


NOTHING_BEHIND_FROZEN_LAYERS = Limit(
    reason="pipeline: a stage that has no gradient to send, as all layers before it are frozen, is refused",
    applies=lambda training, layout: bool(stages_behind_frozen_layers(training.model, layout)),
    repair=lambda training, _layout: without_frozen(training),
    upstream=True,
    torch=">=2.12,<2.13",
)

ROWS_FIRST = Limit(
    reason="pipeline: targets are cut into chunks along dim 0, whatever the inputs are cut along",
    applies=lambda training, _layout: training.data.batch_dim != 0,
    repair=lambda training, _layout: replace(training, data=replace(training.data, batch_dim=0)),
)

NO_COUNTER = Limit(
    reason="pipeline: a buffer that counts forward passes counts every chunk, and the pass that finds out shapes",
    applies=lambda training, _layout: training.model.counter,
    repair=lambda training, _layout: with_model(training, counter=False),
)

NO_LOSS_OF_LAYERS = Limit(
    reason="pipeline: an auxiliary loss of experts goes by how often all rows of a microbatch choose each, but the backward of "
    "its first chunk may run before the forward of its last, and the last stage, which has the loss, has no layer of others",
    applies=lambda training, _layout: training.model.balances,
    repair=lambda training, _layout: each_layer(training, lambda _index, layer: layer.having(balance=0.0)),
)

ONE_MICROBATCH_SCALED = Limit(
    reason="pipeline: scale_grads divides after each microbatch, also what earlier ones have accumulated",
    applies=lambda training, layout: parallelism_of(layout, Pipeline).scale_grads and len(training.data.microbatches) > 1,
    repair=lambda training, _layout: replace(training, data=replace(training.data, microbatches=training.data.microbatches[:1])),
)

MEAN_SCALED = Limit(
    reason="pipeline: scale_grads averages over chunks, which is wrong for a sum loss",
    applies=lambda training, layout: parallelism_of(layout, Pipeline).scale_grads and not training.loss.is_mean,
    repair=lambda training, _layout: replace(training, loss=Loss.LINEAR_MEAN if training.loss.is_linear else Loss.MSE_MEAN),
)


def _alone(layout: Layout) -> Layout:
    mesh = replace(layout.mesh, axes=tuple(axis for axis in layout.mesh.axes if axis.name == PP))
    return replace(layout, mesh=mesh, parallelisms=(parallelism_of(layout, Pipeline),))


NOTHING_AROUND_STAGES = LayoutLimit(
    reason="pipeline: other parallelisms wrap the model as it is called, but a schedule calls stages",
    applies=lambda layout: len(layout.parallelisms) > 1,
    repair=_alone,
)

A_CHUNK_FOR_EACH_STAGE = LayoutLimit(
    reason="pipeline: GPipe needs at least as many chunks as stages",
    applies=lambda layout: (
        parallelism_of(layout, Pipeline).schedule is PipelineSchedule.GPIPE
        and parallelism_of(layout, Pipeline).num_chunks < num_stages(layout)
    ),
    repair=lambda layout: with_options(layout, Pipeline, num_chunks=num_stages(layout)),
    torch="<2.11",
)


def _on_one_rank(layout: Layout) -> Layout:
    axes = tuple(replace(axis, size=1) if axis.name == PP else axis for axis in layout.mesh.axes)
    return replace(
        with_options(layout, Pipeline, boundaries=(), num_chunks=num_stages(layout)), mesh=replace(layout.mesh, axes=axes)
    )


STAGES_OF_ONE_RANK = LayoutLimit(
    reason="pipeline: stages greet each other by an int64 that is received as a float32, which gloo aborts",
    applies=lambda layout: layout.mesh.size(PP) > 1,
    repair=_on_one_rank,
    torch="<2.10",
)


def _has_neighbours_on_one_rank(layout: Layout) -> bool:
    pipeline = parallelism_of(layout, Pipeline)
    return pipeline.schedule.is_v or (layout.mesh.size(PP) == 1 and pipeline.stages_per_rank > 1)


NO_NEIGHBOURS_ON_ONE_RANK = LayoutLimit(
    reason="pipeline: between two neighbouring stages of one rank the rank sends to itself, which gloo refuses",
    applies=_has_neighbours_on_one_rank,
    repair=lambda layout: with_options(
        layout, Pipeline, schedule=PipelineSchedule.GPIPE, stages_per_rank=1, boundaries=(), num_chunks=layout.mesh.size(PP)
    ),
    torch="<2.12",
)

NOTHING_COMPILED = LayoutLimit(
    reason="pipeline: what is compiled is the model as it is called, but a schedule calls stages",
    applies=lambda layout: layout.execution.is_compiled,
    repair=uncompiled,
)

LIMITS: tuple[Limit, ...] = (
    A_LAYER_FOR_EACH_STAGE,
    SCALED_BY_EACH_STAGE,
    ONE_MICROBATCH_SCALED,
    MEAN_SCALED,
    ROWS_FIRST,
    EVEN_CHUNKS,
    NO_COUNTER,
    NO_LOSS_OF_LAYERS,
    NOTHING_BEHIND_FROZEN_LAYERS,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    NOTHING_AROUND_STAGES,
    NOTHING_COMPILED,
    STAGES_OF_ONE_RANK,
    A_CHUNK_FOR_EACH_STAGE,
    NO_NEIGHBOURS_ON_ONE_RANK,
)
