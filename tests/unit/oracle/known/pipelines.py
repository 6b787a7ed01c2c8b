"""Scenarios with known issues in pipelines."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Activation,
    ClipValue,
    Data,
    Layer,
    LocalDataParallel,
    Pipeline,
    PipelineSchedule,
    Replicate,
    Replicator,
)
from unit.oracle.known.builders import (
    AROUND,
    DUAL,
    FOUR_ROWS,
    FROZEN,
    ONE_WEIGHT,
    RETURNED,
    SENT,
    UNTIED,
    V_SHAPED,
    VIEWED,
    ZB,
    around_stages,
    of_positions,
    scenario,
    with_columns_in_stages,
    with_experts_on_ranks,
    with_plan_in_stages,
)

RESHARDED, KEPT = FSDP2(), FSDP2(reshard_after_forward=False)
OF_GIVEN_SHAPES = replace(DUAL, static_shapes=True)
THREE_STAGES = Pipeline(schedule=ZB, stages_per_rank=3, num_chunks=4)
ACTIVATED = Layer(width=4, activation=Activation.TANH)
ONE_ROW = Data(microbatches=(1,))
SEARCHING = DDP(find_unused_parameters=True)
TWO_SIZES = Data(microbatches=(4, 8))

SHOWN = {
    "pipeline_drops_sharded_gradients": (
        around_stages(Pipeline(), RESHARDED, sizes=(2, 1), data=TWO_SIZES),
        [
            around_stages(Pipeline(), RESHARDED, sizes=(2, 1), data=Data(microbatches=(8, 8))),
            around_stages(Pipeline(), LocalDataParallel(), sizes=(2, 1), data=TWO_SIZES),
        ],
    ),
    "ddp_searches_in_dual_pipe_v": (
        around_stages(OF_GIVEN_SHAPES, SEARCHING, num_layers=4, steps=2),
        [
            around_stages(OF_GIVEN_SHAPES, DDP(), num_layers=4, steps=2),
            around_stages(OF_GIVEN_SHAPES, SEARCHING, num_layers=4),
            around_stages(OF_GIVEN_SHAPES, SEARCHING, sizes=(1, 1), steps=2),
            around_stages(replace(OF_GIVEN_SHAPES, schedule=PipelineSchedule.LOOPED_BFS), SEARCHING, num_layers=4, steps=2),
            around_stages(OF_GIVEN_SHAPES, LocalDataParallel(), num_layers=4, steps=2),
        ],
    ),
    "ddp_stage_infers_shapes": (
        around_stages(Pipeline(num_chunks=2), DDP(), steps=2),
        [
            around_stages(Pipeline(num_chunks=2, static_shapes=True), DDP(), steps=2),
            around_stages(Pipeline(num_chunks=2), DDP(find_unused_parameters=True), steps=2),
            around_stages(Pipeline(num_chunks=2), DDP()),
            around_stages(Pipeline(), DDP(), steps=2),
            around_stages(Pipeline(num_chunks=2), LocalDataParallel(), steps=2),
        ],
    ),
    "ddp_stage_of_split_backward": (
        around_stages(Pipeline(schedule=ZB, num_chunks=2, static_shapes=True), DDP(), sizes=(2, 2)),
        [
            around_stages(Pipeline(schedule=ZB, num_chunks=2, static_shapes=True), DDP()),
            around_stages(Pipeline(schedule=ZB, num_chunks=2), LocalDataParallel(), sizes=(2, 2)),
            around_stages(Pipeline(schedule=ZB, num_chunks=2), Replicate(implementation=Replicator.FSDP), sizes=(2, 2)),
            around_stages(Pipeline(schedule=PipelineSchedule.INTERLEAVED, num_chunks=2, static_shapes=True), DDP(), sizes=(2, 2)),
        ],
    ),
    "replicated_stage_of_several_chunks": (
        around_stages(Pipeline(num_chunks=2), Replicate(), sizes=(2, 1)),
        [
            around_stages(Pipeline(), Replicate(), sizes=(2, 1)),
            around_stages(Pipeline(num_chunks=2), Replicate(), sizes=(1, 1)),
            around_stages(Pipeline(num_chunks=2), Replicate(implementation=Replicator.FSDP), sizes=(2, 1)),
        ],
    ),
    "split_backward_around_reshard": (
        around_stages(THREE_STAGES, RESHARDED, num_layers=6),
        [
            around_stages(THREE_STAGES, KEPT, num_layers=6),
            around_stages(replace(THREE_STAGES, schedule=PipelineSchedule.INTERLEAVED), RESHARDED, num_layers=6),
            around_stages(THREE_STAGES, LocalDataParallel(), num_layers=6),
        ],
    ),
    "split_backward_of_resharded_stage": (
        around_stages(Pipeline(schedule=ZB, num_chunks=2), RESHARDED),
        [
            around_stages(Pipeline(schedule=ZB, num_chunks=2), KEPT),
            around_stages(Pipeline(schedule=PipelineSchedule.INTERLEAVED, num_chunks=2), RESHARDED),
            around_stages(Pipeline(schedule=ZB, num_chunks=2), LocalDataParallel()),
        ],
    ),
    "clip_grad_value_of_nothing": (
        scenario(FSDP1(), clipping=ClipValue()),
        [
            scenario(FSDP1(), Layer(width=8), clipping=ClipValue()),
            scenario(FSDP1(use_orig_params=False), clipping=ClipValue()),
            scenario(FSDP2(), clipping=ClipValue()),
        ],
    ),
    "split_backward_of_shared_weight": (
        scenario(Pipeline(schedule=ZB), *UNTIED, *AROUND, features=2),
        [
            scenario(Pipeline(), *UNTIED, *AROUND, features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, AROUND[0], replace(AROUND[1], norm=None), features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, AROUND[0], replace(AROUND[1], frozen=True), features=2),
            scenario(Pipeline(schedule=ZB), UNTIED[0], AROUND[0], features=2),
        ],
    ),
    "split_backward_adds_shared_weight": (
        scenario(Pipeline(schedule=ZB), *UNTIED, AROUND[0], replace(AROUND[1], norm=None), features=2),
        [
            scenario(Pipeline(), *UNTIED, AROUND[0], replace(AROUND[1], norm=None), features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, *UNTIED, features=2),
            scenario(Pipeline(schedule=ZB), *UNTIED, replace(AROUND[0], frozen=True), replace(AROUND[1], norm=None), features=2),
        ],
    ),
    "split_backward_behind_frozen_layers": (
        scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT),
        [
            scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED), FROZEN, ONE_WEIGHT),
            scenario(Pipeline(schedule=ZB), ONE_WEIGHT, FROZEN),
            scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT, sizes=(1,)),
        ],
    ),
    "dual_pipe_v_behind_frozen_layers": (
        scenario(DUAL, FROZEN, *(ONE_WEIGHT,) * 3, data=FOUR_ROWS),
        [
            scenario(DUAL, *(ONE_WEIGHT,) * 4, data=FOUR_ROWS),
            scenario(DUAL, FROZEN, ONE_WEIGHT, sizes=(1,), data=FOUR_ROWS),
            scenario(Pipeline(stages_per_rank=2, schedule=PipelineSchedule.LOOPED_BFS), FROZEN, *(ONE_WEIGHT,) * 3),
        ],
    ),
    "stage_output_not_contiguous": (
        with_columns_in_stages(scenario(Pipeline(), Layer(width=3), Layer(width=2), data=FOUR_ROWS)),
        [
            with_columns_in_stages(scenario(Pipeline(), Layer(width=4), Layer(width=2), data=FOUR_ROWS)),
            with_plan_in_stages(scenario(Pipeline(), Layer(width=3), Layer(width=2), data=FOUR_ROWS)),
        ],
    ),
    "stage_output_of_one_row": (
        with_columns_in_stages(of_positions(scenario(Pipeline(), Layer(width=4), Layer(width=2), data=ONE_ROW))),
        [
            with_columns_in_stages(of_positions(scenario(Pipeline(), Layer(width=4), Layer(width=2)))),
            with_columns_in_stages(of_positions(scenario(Pipeline(), ACTIVATED, Layer(width=2), data=ONE_ROW))),
            with_plan_in_stages(of_positions(scenario(Pipeline(), Layer(width=4), Layer(width=2), data=ONE_ROW))),
        ],
    ),
    "split_backward_of_view": (
        scenario(Pipeline(schedule=ZB), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
        [
            scenario(Pipeline(schedule=ZB), VIEWED, ONE_WEIGHT, VIEWED, sizes=(3,)),
            scenario(Pipeline(), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
            scenario(Pipeline(schedule=ZB), ONE_WEIGHT, SENT, ONE_WEIGHT, sizes=(3,)),
            scenario(Pipeline(schedule=ZB), ONE_WEIGHT, replace(RETURNED, shared=True), ONE_WEIGHT, sizes=(3,)),
            with_plan_in_stages(
                scenario(Pipeline(schedule=ZB), ONE_WEIGHT, replace(ONE_WEIGHT, dropout=0.25), ONE_WEIGHT, sizes=(3,))
            ),
            with_experts_on_ranks(scenario(V_SHAPED, ONE_WEIGHT, replace(SENT, residual=True), ONE_WEIGHT, ONE_WEIGHT)),
        ],
    ),
}
