"""The smallest scenario for each mutant in layers, optimizers, precision and the runtime."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    Adam,
    AdamW,
    Axis,
    Checkpointing,
    ClipNorm,
    Data,
    Execution,
    ExponentialLR,
    Layer,
    LayerPlan,
    Layout,
    LocalDataParallel,
    Loss,
    Mesh,
    Model,
    Norm,
    Optimizer,
    Parallelism,
    ParameterGroup,
    ParameterSelection,
    Pipeline,
    PipelineSchedule,
    Resume,
    Scenario,
    Split,
    TensorParallel,
    Training,
)

LAYER = Layer(width=2)
PLAIN = DDP()
EAGERLY = Execution()


def _scenario(
    *layers: Layer,
    ranks: int = 1,
    axis: str = "dp",
    by: Parallelism = PLAIN,
    execution: Execution = EAGERLY,
    microbatches: tuple[int, ...] = (2,),
    **training: object,
) -> Scenario:
    model = Model(features=2, layers=layers or (LAYER,))
    return Scenario(
        training=Training(model=model, data=Data(microbatches=microbatches), **training),  # type: ignore[arg-type]
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=ranks),)), parallelisms=(by,), execution=execution),
    )


def _updated(optimizer: Optimizer, *, steps: int = 1, groups: tuple[ParameterGroup, ...] = ()) -> Scenario:
    return _scenario(optimizer=optimizer, steps=steps, groups=groups)


def _planned(*layers: Layer, plan: tuple[LayerPlan, ...]) -> Scenario:
    return _scenario(*layers, ranks=2, axis="tp", by=TensorParallel(plan=plan))


def _piped(*layers: Layer, by: Pipeline, **training: object) -> Scenario:
    return _scenario(*layers, axis="pp", by=by, **training)  # type: ignore[arg-type]


def _on_pipelines(*layers: Layer, by: Pipeline, **training: object) -> Scenario:
    """Two pipelines of two ranks, which average gradients explicitly."""
    alone = _piped(*layers, by=by, microbatches=(4,), **training)
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="pp", size=2)))
    return replace(alone, layout=Layout(mesh=mesh, parallelisms=(by, LocalDataParallel())))


def _of_two_calls(by: Pipeline, *microbatches: int) -> Scenario:
    """Run the schedule twice in a step."""
    return _piped(by=by, microbatches=microbatches or (2, 2))


def _of_two_calls_on_pipelines() -> Scenario:
    """Two pipelines of one rank, which average gradients explicitly after two runs of their schedules."""
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="pp", size=1)))
    layout = Layout(mesh=mesh, parallelisms=(Pipeline(), LocalDataParallel()))
    return replace(_of_two_calls(Pipeline()), layout=layout)


def _resumed(scenario: Scenario) -> Scenario:
    return replace(scenario, resume=Resume(layout=scenario.layout, steps=1))


COLUMN = LayerPlan(split=Split.COLWISE)
ROW = LayerPlan(split=Split.ROWWISE)
LEAVES_ROWS = LayerPlan(output=ActivationSharding.ROWS)
NORMED = Layer(width=2, norm=Norm.RMS)
DROPPING = Layer(width=2, dropout=0.5)
TIED = (LAYER, Layer(width=2, shares=0))
TWO_RANKS = _scenario(ranks=2)
SCHEDULED = _scenario(schedule=ExponentialLR(), steps=2)
CHUNKS = Pipeline(num_chunks=2)
DECAYING = SGD(weight_decay=0.1)

MINIMUMS: dict[str, Scenario] = {
    "column_input_gradient_not_reduced": _planned(NORMED, plan=(COLUMN,)),
    "column_input_gradient_reduced_twice": _planned(NORMED, plan=(COLUMN,)),
    "norm_gradient_not_reduced": _planned(LAYER, NORMED, plan=(LEAVES_ROWS, COLUMN)),
    "replicated_layer_gradient_not_reduced": _planned(LAYER, LAYER, plan=(LEAVES_ROWS, LayerPlan())),
    "row_bias_on_every_rank": _planned(LAYER, plan=(ROW,)),
    "row_output_averaged": _planned(LAYER, plan=(ROW,)),
    "row_output_not_reduced": _planned(LAYER, plan=(ROW,)),
    "sharded_along_wrong_dim": _planned(LAYER, plan=(COLUMN,)),
    "fused_weight_split_in_halves": _planned(Layer(width=4), plan=(COLUMN,)),
    "columns_gathered_in_another_order": _planned(LAYER, plan=(COLUMN,)),
    "rows_gathered_in_another_order": _planned(LAYER, LAYER, plan=(LEAVES_ROWS, COLUMN)),
    "masks_drawn_on_each_rank": _planned(DROPPING, plan=(COLUMN,)),
    "full_batch_on_every_rank": _scenario(ranks=2, by=SPMD(), loss=Loss.LINEAR_SUM),
    "partial_gradients_taken_as_reduced": _scenario(ranks=2, by=SPMD(), loss=Loss.LINEAR_SUM),
    "pipeline_chunk_lost": _piped(by=CHUNKS),
    "pipeline_chunks_summed": _piped(by=CHUNKS),
    "pipeline_stages_swapped": _piped(LAYER, LAYER, by=Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2)),
    "pipeline_copies_not_summed": _piped(*TIED, ranks=2, by=CHUNKS),
    "pipeline_copies_summed_each_microbatch": _piped(*TIED, ranks=2, by=CHUNKS, microbatches=(2, 2)),
    "pipeline_copies_in_norm": _piped(*TIED, ranks=2, by=CHUNKS, clipping=ClipNorm()),
    "pipeline_norm_of_own_stages": _piped(LAYER, LAYER, ranks=2, by=CHUNKS, clipping=ClipNorm()),
    "pipeline_last_stage_reduces_only": _on_pipelines(LAYER, LAYER, by=CHUNKS),
    "pipeline_zeroed_between_calls": _of_two_calls(Pipeline()),
    "pipeline_summed_after_each_call": _of_two_calls_on_pipelines(),
    "pipeline_reduced_before_last_call": _of_two_calls_on_pipelines(),
    "pipeline_scales_each_call": _of_two_calls(CHUNKS),
    "pipeline_calls_summed": _of_two_calls(Pipeline()),
    "pipeline_calls_averaged_equally": _of_two_calls(Pipeline(), 2, 1),
    "pipeline_chunks_averaged_equally": _piped(by=replace(CHUNKS, presplit=True), microbatches=(3,)),
    "pipeline_padding_counted": _piped(by=replace(CHUNKS, presplit=True), microbatches=(5,)),
    "decay_on_groups_without": _updated(DECAYING, groups=(ParameterGroup(),)),
    "decay_coupled": _updated(AdamW(weight_decay=0.1)),
    "decay_twice": _updated(DECAYING),
    "groups_forgotten": _updated(SGD(), groups=(ParameterGroup(lr_factor=0.5),)),
    "group_rates_forgotten": _updated(SGD(), groups=(ParameterGroup(select=ParameterSelection.FIRST_LAYER, lr_factor=0.5),)),
    "beta2_lowered": _updated(Adam()),
    "betas_swapped": _updated(Adam()),
    "eps_enlarged": _updated(Adam()),
    "amsgrad_forgotten": _updated(Adam(amsgrad=True)),
    "momentum_forgotten": _updated(SGD(momentum=0.9)),
    "nesterov_forgotten": _updated(SGD(momentum=0.9, nesterov=True)),
    "dampening_forgotten": _updated(SGD(momentum=0.9, dampening=0.5), steps=2),
    "maximize_forgotten": _updated(SGD(maximize=True)),
    "rate_scaled_by_ranks": TWO_RANKS,
    "schedule_stepped_each_rank": _scenario(ranks=2, schedule=ExponentialLR(), steps=2),
    "schedule_stepped_each_microbatch": _scenario(schedule=ExponentialLR(), steps=2, microbatches=(2, 2)),
    "schedule_stuck": SCHEDULED,
    "step_not_counted": _updated(Adam(), steps=2),
    "state_not_restored": _resumed(_updated(SGD(momentum=0.9), steps=2)),
    "reduced_in_bfloat16": _scenario(ranks=2, by=FSDP2()),
    "masters_in_bfloat16": _scenario(),
    "never_unscaled": _scenario(),
    "unscaled_after_clipping": _scenario(clipping=ClipNorm()),
    "mask_redrawn_by_recomputation": _scenario(DROPPING, execution=Execution(checkpointing=Checkpointing.EVERY_LAYER)),
    "mask_overwritten_in_host_memory": _scenario(DROPPING, execution=Execution(checkpointing=Checkpointing.OFFLOAD)),
    "tied_weight_stale": _scenario(*TIED, steps=2),
    "tied_weight_without_gradient": _scenario(*TIED),
    "rank_skips_reduction": TWO_RANKS,
    "rank_reduces_once_more": TWO_RANKS,
    "rank_swaps_calls": TWO_RANKS,
    "read_before_done": TWO_RANKS,
    "rank_raises": TWO_RANKS,
    "rank_skips_update": TWO_RANKS,
}
"""Scenarios by mutant."""
