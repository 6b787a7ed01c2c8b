"""Draw pipeline options to fit the ranks and the model's layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.limits.repairs import with_num_layers, with_options, with_plain_experts
from equivcheck.layouts.composition.limits import repair_layout
from equivcheck.layouts.parallelisms.pipeline.limits import A_CHUNK_FOR_EACH_STAGE, SHAPES_OF_FULL_ACTIVATIONS
from equivcheck.layouts.parallelisms.pipeline.stages import (
    has_ddp_stages,
    has_dtensors_in_layers,
    has_fsdp_stages,
    has_lost_gradients,
    has_replicate_ddp_stages,
    num_stages,
    sometimes_splits_backward,
    splits_backward,
)
from equivcheck.oracle.known_issues.known import known_issues
from equivcheck.scenario import DDP, FSDP2, Layout, Pipeline, PipelineSchedule, Scenario, Training
from equivcheck.scenario.mesh import DP, PP, SHARD
from equivcheck.scenario.model import MAX_LAYERS
from equivcheck.scenario.parallelisms.pipeline import can_run_chunks
from equivcheck.strategies.chance import EVENLY, MOSTLY, SOMETIMES, USUALLY
from equivcheck.system.torch_version import is_torch_in

_NO_STAGES = Pipeline()
_CHUNKS = (1, 1, 2, 2, 3, 3, 4, 6, 8)  # the time for a check grows with the number of chunks
_FREQUENT_IN_PIPELINES = (
    "clip_grad_value_of_nothing",
    "dual_pipe_v_behind_frozen_layers",
    "inf_norm_of_empty_shard",
    "split_backward_behind_frozen_layers",
    "split_backward_of_shared_weight",
    "split_backward_of_view",
)
"""Known issues that together stop as many as a tenth of a pipeline layout's checks."""


def needs_stages(layout: Layout) -> bool:
    """Whether the layout has a pipeline whose options must still be drawn. Default options mark it."""
    return bool(layout.of(Pipeline)) and layout == repair_layout(_with_pipeline(layout, _NO_STAGES))


def with_drawn_schedule(draw: DrawFn, layout: Layout) -> Layout:
    """Give the layout a schedule that its ranks can run; a third keep the default. The model needs a layer for each stage."""
    if not draw(MOSTLY):
        return repair_layout(_usually_right(draw, layout))
    ranks = layout.mesh.size(PP)
    schedule, stages_per_rank = draw(_schedules(ranks))
    pipeline = Pipeline(
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_chunks=draw(_chunks(schedule, ranks)),
        static_shapes=draw(SOMETIMES),
        scale_grads=draw(SOMETIMES),
        presplit=draw(SOMETIMES),
        sends_dtensors=has_dtensors_in_layers(layout) and draw(EVENLY),
    )
    layout = _with_pipeline(layout, pipeline)
    return repair_layout(_usually_right(draw, layout))


def _usually_right(draw: DrawFn, layout: Layout) -> Layout:
    """If stages reduce their own gradients, usually change options with which torch loses them or reduces them wrongly."""
    if not (any(each.reduces_each_module for each in layout.parallelisms) and draw(USUALLY)):
        return layout
    if has_lost_gradients(layout):
        layout = with_options(layout, FSDP2, reshard_after_forward=False, reshard_to=None)
    if layout.mesh.size(DP, SHARD) == 1 and not layout.propagates_placements:
        # One shard rank may apply a divide factor twice (`fsdp2_one_shard_divided_twice`). DTensor experts get one too.
        layout = with_plain_experts(with_options(layout, FSDP2, gradient_divide_factor=None))
    if layout.mesh.size(DP) > 1 and (has_ddp_stages(layout) or has_replicate_ddp_stages(layout)):
        if splits_backward(layout):
            layout = with_options(layout, Pipeline, schedule=PipelineSchedule.LOOPED_BFS)
        if has_replicate_ddp_stages(layout):
            layout = _in_one_chunk(layout)
    if has_ddp_stages(layout) and layout.num_chunks > 1:
        layout = with_options(layout, Pipeline, static_shapes=True)
        if SHAPES_OF_FULL_ACTIVATIONS.applies(layout):
            # DDP that searches for unused parameters keeps its buckets, so the pass that infers shapes does no harm.
            layout = with_options(layout, DDP, find_unused_parameters=True)
    if sometimes_splits_backward(layout) and any(ddp.find_unused_parameters for ddp in layout.of(DDP)):
        layout = with_options(layout, Pipeline, schedule=PipelineSchedule.LOOPED_BFS)
    return layout


def _in_one_chunk(layout: Layout) -> Layout:
    """Run stages in one chunk, by the looped schedule if theirs cannot."""
    schedule, ranks = parallelism_of(layout, Pipeline).schedule, layout.mesh.size(PP)
    needs_chunks = schedule is PipelineSchedule.GPIPE and ranks > 1 and is_torch_in(A_CHUNK_FOR_EACH_STAGE.torch)
    if needs_chunks or not can_run_chunks(schedule, 1, ranks):
        schedule = PipelineSchedule.LOOPED_BFS
    return with_options(layout, Pipeline, schedule=schedule, num_chunks=1)


def with_usual_rows(draw: DrawFn, training: Training, layout: Layout) -> Training:
    """If pipeline stages use FSDP, usually give all microbatches as many rows as the first one.

    Each size has its own schedule, whose first step drops accumulated gradients (`pipeline_drops_sharded_gradients`).
    """
    if not (has_fsdp_stages(layout) and draw(USUALLY)):
        return training
    rows = training.data.microbatches
    return replace(training, data=replace(training.data, microbatches=rows[:1] * len(rows)))


def with_usual_workarounds(draw: DrawFn, scenario: Scenario) -> Scenario:
    """If a pipeline could show frequent known issues, usually apply their workarounds."""
    # Drawn for every pipeline, because a scenario that shows no issue must take no more choices than others.
    if draw(USUALLY):
        for issue in known_issues():
            if issue.id in _FREQUENT_IN_PIPELINES and issue.could_show(scenario):
                scenario = issue.avoid(scenario) or scenario
    return scenario


def with_a_layer_for_each_stage(training: Training, layout: Layout) -> Training:
    """Add layers until each stage has one."""
    count = num_stages(layout)
    return training if len(training.model.layers) >= count else with_num_layers(training, count)


def with_drawn_boundaries(draw: DrawFn, layout: Layout, num_layers: int) -> Layout:
    """Choose how many layers each pipeline stage has: as evenly as possible or, in half of all cases, any drawn numbers."""
    count = num_stages(layout)
    if count == 1 or not draw(EVENLY):
        return layout
    return _with_pipeline(layout, replace(parallelism_of(layout, Pipeline), boundaries=draw(_boundaries(num_layers, count))))


@cache
def _schedules(ranks: int) -> SearchStrategy[tuple[PipelineSchedule, int]]:
    """Return a strategy for schedules with equal weight, and stages per rank: one stage per rank if the schedule allows it."""
    most = MAX_LAYERS // ranks
    return st.sampled_from(
        [
            (schedule, stages)
            for schedule in PipelineSchedule
            for stages in ((1,) * 3 if schedule.is_single else (2,) * 3 if schedule.is_v else (1, 2, 3))
            if stages <= most
        ]
    )


@cache
def _chunks(schedule: PipelineSchedule, ranks: int) -> SearchStrategy[int]:
    return st.sampled_from([chunks for chunks in (*_CHUNKS, 2 * ranks) if can_run_chunks(schedule, chunks, ranks)])


@cache
def _boundaries(num_layers: int, num_stages: int) -> SearchStrategy[tuple[int, ...]]:
    return st.sampled_from(list(combinations(range(1, num_layers), num_stages - 1)))


def _with_pipeline(layout: Layout, pipeline: Pipeline) -> Layout:
    parallelisms = tuple(pipeline if isinstance(other, Pipeline) else other for other in layout.parallelisms)
    return replace(layout, parallelisms=parallelisms)
