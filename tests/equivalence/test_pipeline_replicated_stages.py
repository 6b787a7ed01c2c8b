"""Pipelines whose stages DDP or `replicate` replicates over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.scenario import (
    DDP,
    AuxiliaryLinear,
    Head,
    Layer,
    Loss,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Replicate,
    Replicator,
    Wrapping,
    ZeroGrad,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.stage import Stage
from support.clipped import clipped_scenario
from support.exported import run_script
from support.staged import DECODER, PIPELINES
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

STAGE_WITHOUT_TRAINING = "a pipeline stage that uses no trained parameter in some step"
TRAINED = replace(DECODER, layers=(*DECODER.layers[:3], replace(DECODER.layers[3], frozen=False)))
UNTIED = replace(TRAINED, head=replace(TRAINED.head, tied=False))
SMALL_BUCKETS = 0.0001
STAGES: dict[str, Parallelism] = {
    "ddp": DDP(),
    "ddp_small_buckets": DDP(
        bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True, find_unused_parameters=True, no_sync=True
    ),
    "ddp_unequal_start": DDP(unequal_start=True, zero_redundancy=True),
    "replicate_with_fsdp": Replicate(implementation=Replicator.FSDP, wrapping=Wrapping.PER_LAYER, no_sync=True),
}
ONE_CHUNK = Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2)


def a_scenario(
    pipeline: Pipeline,
    around: Parallelism,
    axes: Mapping[str, int] | None = None,
    model: Model = TRAINED,
    *,
    static_shapes: bool = True,
    **changes: object,
) -> Scenario:
    """Two clipped steps of two microbatches."""
    fields = {"microbatches": (16, 16), "zero_grad": ZeroGrad.ZERO} | changes
    pipeline = replace(pipeline, static_shapes=static_shapes)
    return clipped_scenario(model, axes or {"dp": 2, "pp": 2}, pipeline, around, **fields)


V_SHAPED = {name for name, pipeline in PIPELINES.items() if pipeline.schedule.is_v}


@pytest.mark.parametrize(
    ("name", "stages"),
    [(name, stages) for name in PIPELINES for stages in STAGES if not (name in V_SHAPED and isinstance(STAGES[stages], DDP))],
)
def test_replicated_stages_equal_one_device(name: str, stages: str) -> None:
    """Stages average gradients in each microbatch, or in the last one only. Stages on two ranks may share the embedding."""
    scenario = a_scenario(PIPELINES[name], STAGES[stages], model=UNTIED if name in V_SHAPED else TRAINED)
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in V_SHAPED])
@pytest.mark.parametrize("stages", STAGES)
def test_calls_of_replicated_stages_are_predicted(name: str, stages: str) -> None:
    """If no weight has copies in two stages, calls follow from the scenario: each stage has buckets of its own."""
    scenario = a_scenario(PIPELINES[name], STAGES[stages], model=replace(UNTIED, offset=True))
    require_supported(scenario)
    require_reductions_predicted(scenario)


@pytest.mark.parametrize("around", [DDP(), DDP(no_sync=True), Replicate(no_sync=True)], ids=["ddp", "no_sync", "hooks"])
def test_each_size_infers_shapes_by_a_forward_of_its_own(around: Parallelism) -> None:
    """The forward that infers shapes broadcasts buffers, so the next one in the same step does, too."""
    model = Model(features=2, layers=(Layer(width=2), Layer(width=2)), offset=True)
    scenario = a_scenario(Pipeline(), around, model=model, static_shapes=False, microbatches=(2, 4, 2))
    require_supported(scenario)
    require_reductions_predicted(scenario)


def test_each_stage_has_a_bucket_of_its_own() -> None:
    """Two stages on a rank, each with six gradients, all-reduce after each of two microbatches, in both steps."""
    model = Model(features=2, layers=(Layer(width=2),) * 4)
    scenario = a_scenario(ONE_CHUNK, DDP(no_sync=True), model=model, microbatches=(4, 4))
    require_supported(scenario)
    totals = predict_calls(scenario.training, scenario.layout, rank=1).totals
    assert [totals[step, Stage.COMPUTE, "all_reduce.sum", "dp"] for step in range(2)] == [(4, 4 * 6 * 8)] * 2
    require_reductions_predicted(scenario)


def require_reductions_predicted(scenario: Scenario) -> None:
    """Require that a check compares the stages' reductions with predictions, and finds no difference."""
    assert not predict_calls(scenario.training, scenario.layout).reason
    check(scenario).assert_equivalent()


@pytest.mark.parametrize(
    "around",
    [DDP(), DDP(static_graph=True), Replicate(), Replicate(implementation=Replicator.FSDP)],
    ids=["ddp", "static_graph", "hooks", "fsdp"],
)
@pytest.mark.parametrize("axes", [{"dp": 2, "pp": 1}, {"dp": 1, "pp": 2}, {"dp": 3, "pp": 2}])
def test_stages_of_one_chunk_equal_one_device(axes: Mapping[str, int], around: Parallelism) -> None:
    """With one chunk, also the hooks of `replicate` and a static graph average all gradients."""
    scenario = a_scenario(ONE_CHUNK, around, axes, model=UNTIED, microbatches=(12, 12))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("stages", ["ddp", "replicate_with_fsdp"])
def test_processes_compute_the_same(stages: str) -> None:
    """Gloo computes what simulated ranks compute."""
    scenario = a_scenario(PIPELINES["1f1b_of_uneven_stages"], STAGES[stages])
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


WRITTEN = [*(("gpipe", name) for name in STAGES), ("interleaved", "ddp_small_buckets"), ("interleaved", "ddp")]


@pytest.mark.parametrize(("name", "stages"), WRITTEN)
def test_a_script_computes_what_ranks_compute(name: str, stages: str, tmp_path: Path) -> None:
    """A script wraps each stage before the schedule gets it. Only the last stage has the output scale."""
    model = replace(TRAINED, scale=True) if stages.startswith("ddp") else UNTIED
    scenario = a_scenario(PIPELINES[name], STAGES[stages], model=model)
    require_supported(scenario)
    script, _ = run_script(scenario, tmp_path)
    assert "for part in parts" in script


def test_buffers_of_the_last_stage_start_equal() -> None:
    """DDP broadcasts the offset that the last stage adds to its outputs."""
    model = Model(features=2, layers=(Layer(width=2), Layer(width=2)), offset=True)
    scenario = a_scenario(Pipeline(), DDP(unequal_start=True), model=model, loss=Loss.MSE_SUM)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_a_stage_of_frozen_layers_is_refused() -> None:
    """DDP needs a trained parameter in each stage."""
    require_supported(a_scenario(Pipeline(), DDP()))
    model = Model(features=2, layers=(Layer(width=2), Layer(width=2, frozen=True)))
    scenario = a_scenario(Pipeline(), DDP(), model=model, loss=Loss.MSE_SUM)
    assert STAGE_WITHOUT_TRAINING in (limit_reason(scenario.training, scenario.layout) or "")
    assert not any(layer.frozen for layer in repair_training(scenario.training, scenario.layout).model.layers)


@pytest.mark.torch(">=2.11", "GPipe of earlier versions needs as many chunks as stages")
@pytest.mark.parametrize(
    ("auxiliary", "steps", "is_refused"),
    [(AuxiliaryLinear.EVEN_STEPS, 1, False), (AuxiliaryLinear.EVEN_STEPS, 2, True), (AuxiliaryLinear.NEVER, 1, True)],
)
def test_a_stage_that_trains_nothing_in_some_step_is_refused(auxiliary: AuxiliaryLinear, steps: int, is_refused: bool) -> None:
    """The last stage trains only an auxiliary linear. In a step in which it does not run, none of DDP's hooks runs."""
    layers = (Layer(width=2), Layer(width=2, frozen=True), Layer(width=2, bias=False, shares=1, auxiliary=auxiliary))
    model = Model(features=2, layers=layers)
    parallelisms = (Pipeline(boundaries=(2,)), DDP(find_unused_parameters=True))
    scenario = a_scenario(*parallelisms, model=model, loss=Loss.MSE_SUM)
    scenario = replace(scenario, training=replace(scenario.training, steps=steps))
    assert (STAGE_WITHOUT_TRAINING in (limit_reason(scenario.training, scenario.layout) or "")) is is_refused
    assert limit_reason(repair_training(scenario.training, scenario.layout), scenario.layout) is None


@pytest.mark.parametrize("changes", [{}, {"norm": Norm.RMS}, {"bias": True}, {"tied": False}], ids=str)
def test_a_stage_with_only_a_frozen_embedding_in_its_head_is_refused(changes: Mapping[str, object]) -> None:
    """A tied head without bias and norm has no parameter but the embedding's weight."""
    require_supported(a_scenario(Pipeline(boundaries=(3,)), DDP()))
    layers = (*TRAINED.layers[:3], replace(TRAINED.layers[3], frozen=True))
    head = replace(Head(tied=True), **changes)
    assert TRAINED.source is not None
    model = replace(TRAINED, layers=layers, source=replace(TRAINED.source, frozen=True), head=head)
    scenario = a_scenario(Pipeline(boundaries=(3,)), DDP(), model=model)
    is_refused = STAGE_WITHOUT_TRAINING in (limit_reason(scenario.training, scenario.layout) or "")
    assert is_refused == (not changes)
    assert limit_reason(repair_training(scenario.training, scenario.layout), scenario.layout) is None


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        pytest.param(
            Pipeline(num_chunks=2, static_shapes=True),
            "that run several chunks",
            marks=pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo"),
            id="chunks",
        ),
        pytest.param(
            Pipeline(),
            "that infer their shapes",
            marks=pytest.mark.torch(">=2.12", "earlier versions infer shapes without a backward"),
            id="inferred",
        ),
        pytest.param(
            Pipeline(num_chunks=2),
            "that infer their shapes",
            marks=pytest.mark.torch(">=2.12", "earlier versions infer shapes without a backward"),
            id="inferred_chunks",
        ),
        pytest.param(
            Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, static_shapes=True),
            "under a zero-bubble schedule",
            marks=pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo"),
            id="zero_bubble",
        ),
    ],
)
def test_a_static_graph_is_refused(pipeline: Pipeline, reason: str) -> None:
    """DDP would count a backward without synchronization, or the one that infers shapes, as an iteration."""
    scenario = a_scenario(pipeline, DDP(static_graph=True), static_shapes=pipeline.static_shapes)
    assert reason in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_layout(scenario.layout).parallelisms[1] == DDP()


@pytest.mark.torch(">=2.12", "earlier versions fail an assertion")
def test_the_only_stage_may_have_a_static_graph_and_infer_shapes() -> None:
    """Of several chunks, too: the pass that infers shapes runs through DDP before the first one."""
    scenario = a_scenario(Pipeline(num_chunks=2), DDP(static_graph=True), {"dp": 2, "pp": 1}, static_shapes=False, model=UNTIED)
    check(scenario).assert_equivalent()


@pytest.mark.torch(">=2.12", "earlier versions have no DualPipeV over gloo")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_search_for_unused_parameters_in_dual_pipes_is_a_known_crash(ranks: int) -> None:
    """DDP raises in the second microbatch if DualPipeV ran the first one."""
    dual = Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4)
    scenario = a_scenario(dual, DDP(find_unused_parameters=True), {"dp": ranks, "pp": 2}, model=UNTIED)
    verdict = check(scenario)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, "ddp_searches_in_dual_pipe_v")


@pytest.mark.parametrize("stages", [name for name, stages in STAGES.items() if isinstance(stages, DDP)])
def test_zero_bubble_schedules_do_not_average_all_gradients(stages: str) -> None:
    """DDP's hooks do not run in the separate pass for weight gradients of stages behind the first."""
    scenario = a_scenario(PIPELINES["zbv"], STAGES[stages], model=UNTIED)
    require_supported(scenario)
    verdict = check(scenario)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, "ddp_stage_of_split_backward")


@pytest.mark.skipif(is_torch_in("<2.12"), reason="torch infers shapes without a backward")
def test_inferred_shapes_are_a_known_crash() -> None:
    """DDP takes the pass in which a stage infers its shapes for its first iteration, and raises in the second step."""
    scenario = a_scenario(Pipeline(num_chunks=2), DDP(), static_shapes=False)
    verdict = check(scenario)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, "ddp_stage_infers_shapes")


def test_hooks_miss_further_chunks() -> None:
    """Schedules do not know `replicate`, which averages the first chunk's gradients only."""
    scenario = a_scenario(PIPELINES["gpipe"], Replicate())
    require_supported(scenario)
    verdict = check(scenario)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, "replicated_stage_of_several_chunks")


@pytest.mark.torch("<2.10", "later versions have stages on several ranks over gloo")
def test_stages_move_to_one_rank_with_their_options() -> None:
    """On torch 2.9, a repaired default pipeline still has one chunk, so that hooks of `replicate` average all gradients."""
    on_ranks = a_scenario(Pipeline(), Replicate(), static_shapes=False)
    repaired = a_scenario(Pipeline(), Replicate(), {"dp": 2, "pp": 1}, static_shapes=False)
    assert repair_layout(on_ranks.layout) == repaired.layout
