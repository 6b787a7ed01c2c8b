"""Pipelines whose layers other parallelisms spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from equivcheck import Scenario, check
from equivcheck.export.script import CannotExport, script_of
from equivcheck.layouts.composition.fitting import fit_training
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Activation,
    ActivationSharding,
    Attention,
    AttentionExchange,
    Axis,
    Checkpointing,
    Collectives,
    ContextParallel,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    ExpertStorage,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    LoadBalancer,
    LocalDataParallel,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    PlannedParallelism,
    Replicate,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.training.setup import Setup
from equivcheck.worlds.meshes import group_of
from support.clipped import clipped_scenario
from support.exported import differences_of_traces, run_script
from support.supported import TYPED, require_supported

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=5, padding=1),
    length=5,
    layers=(
        Attention(num_heads=2, num_kv_heads=2, head_dim=2, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=3, bias=True),
        Layer(width=4, residual=True, dropout=0.25),
        Experts(hidden=3, num_experts=3, norm=Norm.RMS),
    ),
    head=Head(norm=Norm.RMS),
)
EVEN = replace(
    DECODER,
    length=4,
    layers=(DECODER.layers[0], GatedMLP(hidden=4, bias=True), DECODER.layers[2], GatedMLP(hidden=4, norm=Norm.RMS)),
)
"""A decoder whose heads, hidden features and positions two ranks can share evenly, as DTensors need."""
THREE_EXPERTS = Experts(hidden=2, num_experts=3, dropout=0.25)
SCHEDULES = {
    "gpipe": Pipeline(num_chunks=2),
    "zbv": Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2),
}
SPLITS = (Split.HEADS_OR_HIDDEN, Split.HEADS_OR_HIDDEN, Split.COLWISE, Split.HEADS_OR_HIDDEN)


def planned(output: ActivationSharding, kind: type[PlannedParallelism] = LocalTensorParallel, **options: Any) -> Parallelism:
    """All layers sharded, with a loss over sharded logits."""
    return kind(
        plan=tuple(LayerPlan(split=split, output=output) for split in SPLITS),
        source=Split.ROWWISE,
        source_output=output,
        head=Split.COLWISE,
        loss_parallel=True,
        **options,
    )


INNER: dict[str, tuple[str, Parallelism]] = {
    "tensor": ("tp", planned(ActivationSharding.REPLICATED)),
    "sequence": ("tp", planned(ActivationSharding.ROWS)),
    "typed": ("tp", planned(ActivationSharding.ROWS, collectives=Collectives.TYPED)),
    "dtensor": ("tp", planned(ActivationSharding.REPLICATED, TensorParallel)),
    "dtensor_sequence": ("tp", planned(ActivationSharding.ROWS, TensorParallel)),
    "gather": ("cp", ContextParallel(balance=LoadBalancer.HEAD_TAIL)),
    "ring": ("cp", ContextParallel(exchange=AttentionExchange.RING)),
    "experts": ("ep", ExpertParallel()),
}


def a_scenario(
    inner: str, pipeline: Pipeline, *around: Parallelism, rows: tuple[int, int] = (16, 8), model: Model | None = None
) -> Scenario:
    """Two clipped steps of two microbatches, by default of unequal size."""
    axis, parallelism = INNER[inner]
    axes = {**({"dp": 2} if around else {}), "pp": 2, axis: 2}
    model = model or (EVEN if isinstance(parallelism, TensorParallel) else DECODER)
    return clipped_scenario(model, axes, parallelism, pipeline, *around, microbatches=rows)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("inner", [pytest.param(name, marks=[TYPED] * (name == "typed")) for name in INNER])
def test_spread_layers_in_stages_equal_one_device(inner: str, name: str) -> None:
    """Stages send a rank's positions, its rows, or the shards that a plan leaves."""
    scenario = a_scenario(inner, SCHEDULES[name])
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert "inside stages" not in verdict.unmodelled


def reduce_once_more(axis: str, setup: Setup) -> None:
    """Let ranks along an axis add up zeros before each update."""
    assert setup.layout is not None
    groups = {line: group_of(line) for line in setup.layout.mesh.lines(axis)}
    (own,) = (group for line, group in groups.items() if dist.get_rank() in line)
    setup.before_update.append(lambda _optimizer, _step: dist.all_reduce(torch.zeros(3), group=own) and None)


@pytest.mark.parametrize("inner", ["tensor", "gather", "experts"])
def test_calls_along_all_axes_are_compared(inner: str) -> None:
    """One more all-reduce is a difference along each axis: of data-parallel ranks, stages, or layers inside stages."""
    scenario = a_scenario(inner, SCHEDULES["gpipe"], LocalDataParallel())
    require_supported(scenario)
    for axis in scenario.layout.mesh.names:
        verdict = check(scenario, alter=partial(reduce_once_more, axis))
        assert verdict.outcome is Outcome.DIVERGED, axis
        assert verdict.divergence is not None
        assert verdict.divergence.tensor.startswith(f"all_reduce.sum over {axis} ")


def send_once_more(setup: Setup) -> None:
    """Let each of two context-parallel ranks send zeros to the other before each update."""
    assert setup.layout is not None
    (own,) = (line for line in setup.layout.mesh.lines("cp") if dist.get_rank() in line)
    groups = {line: group_of(line) for line in setup.layout.mesh.lines("cp")}
    other = own[1 - own.index(dist.get_rank())]

    def exchange(_optimizer: Any, _step: int) -> None:
        messages = [dist.P2POp(call, torch.zeros(3), other, groups[own]) for call in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    setup.before_update.append(exchange)


def test_sends_along_rings_are_compared() -> None:
    """Only sends between stages are not predicted."""
    verdict = check(a_scenario("ring", SCHEDULES["gpipe"]), alter=send_once_more)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.tensor.startswith("recv over cp ")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("inner", "static_shapes"),
    [("sequence", False), ("dtensor_sequence", False), ("ring", False), ("ring", True), ("experts", False), ("experts", True)],
)
def test_passes_that_infer_shapes_and_recomputation_are_predicted(inner: str, static_shapes: bool, name: str) -> None:
    """If several passes of a split backward may recompute layers, only the calls of these layers are not predicted."""
    checkpointed = Execution(checkpointing=Checkpointing.EVERY_LAYER)
    scenario = a_scenario(inner, replace(SCHEDULES[name], static_shapes=static_shapes), model=EVEN)
    scenario = replace(scenario, layout=replace(scenario.layout, execution=checkpointed))
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert ("inside stages" in verdict.unmodelled) is (name == "zbv")


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
@pytest.mark.parametrize(
    "schedule",
    [
        PipelineSchedule.GPIPE,
        pytest.param(
            PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
            marks=pytest.mark.torch(
                ">=2.13", "a split backward of earlier versions computes a wrong gradient of a shared weight"
            ),
        ),
    ],
)
def test_calls_are_not_predicted_if_both_backward_passes_run_through_a_layer(schedule: PipelineSchedule) -> None:
    """The pass for weights starts at the last use of a shared weight, and runs through the layer with its first use again."""
    layers = (Layer(width=2), Layer(width=2), Layer(width=2, shares=1), Layer(width=2))
    by_rows = LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS)
    plan = (LayerPlan(output=ActivationSharding.ROWS), by_rows, by_rows, LayerPlan(split=Split.ROWWISE))
    training = Training(model=Model(features=8, layers=layers), data=Data(microbatches=(4,)), loss=Loss.MSE_SUM)
    mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="tp", size=2)))
    stages = Pipeline(schedule=schedule, num_chunks=2, boundaries=(1,))
    layout = Layout(mesh=mesh, parallelisms=(LocalTensorParallel(plan=plan), stages))
    verdict = check(Scenario(training=training, layout=layout))
    verdict.assert_equivalent()
    assert ("inside stages" in verdict.unmodelled) is (schedule is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)


@pytest.mark.torch(">=2.13", "earlier versions refuse neighbouring stages on one rank, or a stage behind frozen layers only")
def test_calls_behind_a_norm_that_becomes_trainable_are_not_predicted() -> None:
    """`SequenceParallel` makes the second stage's norm trainable, so the third computes an input gradient.

    The schedule drops the norm's own gradient, because only frozen layers come before its stage.
    """
    frozen = Layer(width=2, bias=False, frozen=True)
    layers = (frozen, replace(frozen, activation=Activation.TANH, norm=Norm.LAYER), Layer(width=2, bias=False))
    training = Training(model=Model(features=2, layers=layers), data=Data(microbatches=(4,)))
    columns = LayerPlan(split=Split.COLWISE)
    plan = TensorParallel(plan=(LayerPlan(output=ActivationSharding.ROWS), columns, columns))
    stages = Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, stages_per_rank=3, boundaries=(1, 2))
    mesh = Mesh(axes=(Axis(name="pp", size=1), Axis(name="tp", size=2)))
    scenario = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, stages)))
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert "makes a frozen norm trainable" in verdict.unmodelled


@pytest.mark.torch(">=2.12", "earlier versions have no neighbouring stages on one rank")
def test_every_rank_has_experts_to_recompute_if_the_backward_is_split() -> None:
    """With three experts on four ranks, the last rank would recompute less often, so ranks would raise or wait forever."""
    layers = (Layer(width=4), Layer(width=4, residual=True), THREE_EXPERTS, Layer(width=4))
    training = Training(model=Model(features=4, length=2, layers=layers), data=Data(microbatches=(8,)))
    mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="ep", size=4)))
    stages = Pipeline(schedule=PipelineSchedule.ZBV, num_chunks=2, stages_per_rank=2)
    layout = Layout(
        mesh=mesh,
        parallelisms=(ExpertParallel(), stages),
        execution=Execution(checkpointing=Checkpointing.EVERY_LAYER),
    )
    assert "a rank without any expert" in (limit_reason(training, layout) or "")
    fitted = fit_training(training, layout)
    assert [layer.num_experts for layer in fitted.model.layers if isinstance(layer, Experts)] == [4]
    check(Scenario(training=fitted, layout=layout)).assert_equivalent()


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_a_rank_of_the_first_stage_may_have_no_expert_to_recompute() -> None:
    """The first stage computes no input gradients, so one backward pass computes all its gradients."""
    training = Training(model=Model(features=4, length=2, layers=(THREE_EXPERTS, Layer(width=4))), data=Data(microbatches=(8,)))
    mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="ep", size=4)))
    stages = Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, num_chunks=2)
    execution = Execution(checkpointing=Checkpointing.EVERY_LAYER)
    scenario = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(ExpertParallel(), stages), execution=execution))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("inner", ["tensor", "dtensor"])
def test_copies_of_shards_are_predicted(inner: str) -> None:
    """The last stage's only shard is a copy of the first stage's embedding, so the last stage reduces no norm over shards."""
    model = replace(EVEN, layers=EVEN.layers[:2], head=Head(tied=True))
    scenario = a_scenario(inner, SCHEDULES["gpipe"], model=model)
    (plan, pipeline) = scenario.layout.parallelisms
    assert isinstance(plan, PlannedParallelism)
    plan = replace(plan, plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN), LayerPlan()))
    scenario = replace(scenario, layout=replace(scenario.layout, parallelisms=(plan, pipeline)))
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_padding_of_chunks_is_in_no_loss() -> None:
    """Five rows a rank in two chunks make three rows each, but the loss over sharded logits has five."""
    scenario = a_scenario("tensor", Pipeline(num_chunks=2, presplit=True), rows=(5, 3))
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_empty_shards_of_tied_weights_are_not_summed() -> None:
    """With one feature on two ranks, the second tensor-parallel rank has an empty shard, so it calls no all-reduce."""
    tied = Model(features=1, source=Tokens(vocabulary=5), length=3, layers=(Layer(width=1),) * 2, head=Head(tied=True))
    plan = LocalTensorParallel(plan=(LayerPlan(split=Split.NOT_IN_PLAN),) * 2, source=Split.COLWISE, head=Split.ROWWISE)
    scenario = clipped_scenario(tied, {"pp": 2, "tp": 2}, plan, Pipeline(), microbatches=(8,))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("inner", ["dtensor", "dtensor_sequence"])
def test_stages_send_dtensors(inner: str, schedule: PipelineSchedule) -> None:
    """Stages of all schedules get the placements of what other stages send, and of its gradient."""
    stages_per_rank = 1 if schedule.is_single else 2
    pipeline = Pipeline(schedule=schedule, stages_per_rank=stages_per_rank, num_chunks=4, sends_dtensors=True)
    scenario = a_scenario(inner, pipeline)
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.torch(">=2.12", "PipelineStage of earlier versions has no get_mesh")
def test_processes_send_dtensors() -> None:
    """Gloo computes what simulated ranks compute."""
    check(a_scenario("dtensor_sequence", replace(SCHEDULES["zbv"], sends_dtensors=True)), world="gloo").assert_equivalent()


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_only_stages_with_dtensors_send_them() -> None:
    """Activations of other layers have no placements."""
    scenario = a_scenario("tensor", Pipeline(num_chunks=2, sends_dtensors=True))
    assert "sends_dtensors without parallelize_module" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_layout(scenario.layout) == a_scenario("tensor", Pipeline(num_chunks=2)).layout


@pytest.mark.parametrize("inner", ["sequence", "gather", "experts"])
def test_three_axes_equal_one_device(inner: str) -> None:
    """Gradients are averaged over data-parallel ranks, which hold the same stage and the same shards."""
    scenario = a_scenario(inner, SCHEDULES["gpipe"], LocalDataParallel())
    require_supported(scenario)
    check(scenario).assert_equivalent()


SHARDED_STAGES = FSDP2(wrapping=Wrapping.PER_LAYER, reshard_after_forward=False, embedding_unit=True)
SHARDED_LAYERS = replace(SHARDED_STAGES, embedding_unit=False)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("inner", [name for name in INNER if name != "typed"])
def test_sharded_stages_of_spread_layers_equal_one_device(inner: str, name: str) -> None:
    """`fully_shard` shards each stage's parts of parameters once more, over ranks with the same stage and the same parts."""
    scenario = a_scenario(inner, SCHEDULES[name], SHARDED_STAGES, rows=(16, 16))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("inner", ["dtensor", "dtensor_sequence"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sharded_stages_send_dtensors(inner: str, name: str) -> None:
    """Messages have placements on the tensor-parallel mesh, also if parameters are sharded over data-parallel ranks as well."""
    scenario = a_scenario(inner, replace(SCHEDULES[name], sends_dtensors=True), SHARDED_STAGES, rows=(16, 16))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("inner", ["sequence", "dtensor_sequence"])
def test_processes_shard_stages_of_spread_layers(inner: str) -> None:
    """Gloo computes what simulated ranks compute."""
    scenario = a_scenario(inner, SCHEDULES["zbv"], SHARDED_STAGES, rows=(16, 16))
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


@pytest.mark.parametrize(("inner", "name"), [("ring", "gpipe"), ("sequence", "zbv"), pytest.param("typed", "gpipe", marks=TYPED)])
def test_processes_compute_the_same(inner: str, name: str) -> None:
    """Gloo computes what simulated ranks compute, and sends only contiguous tensors."""
    scenario = a_scenario(inner, SCHEDULES[name])
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


def of_rows(
    *around: Parallelism,
    kind: type[PlannedParallelism] = LocalTensorParallel,
    width: int = 3,
    dropout: float = 0.25,
    rows: tuple[int, int] = (10, 2),
    sends_dtensors: bool = False,
    **options: Any,
) -> Scenario:
    """Linears without sequences, which leave shards of rows or of features."""
    outputs = (ActivationSharding.ROWS, ActivationSharding.FEATURES, ActivationSharding.ROWS, ActivationSharding.REPLICATED)
    splits = (Split.ROWWISE, Split.COLWISE, Split.ROWWISE, Split.COLWISE)
    plan = tuple(LayerPlan(split=split, output=output) for split, output in zip(splits, outputs, strict=True))
    model = Model(features=width, layers=tuple(Layer(width=width, dropout=dropout, activation=Activation.TANH) for _ in plan))
    axes = {**({"dp": 2} if around else {}), "pp": 2, "tp": 2}
    tensor_parallel = kind(plan=plan, **options)
    pipeline = replace(SCHEDULES["zbv"], sends_dtensors=sends_dtensors)
    return clipped_scenario(model, axes, tensor_parallel, pipeline, *around, microbatches=rows, loss=Loss.MSE_MEAN)


@pytest.mark.parametrize("collectives", [Collectives.FUNCTIONAL, pytest.param(Collectives.TYPED, marks=TYPED)])
def test_stages_send_shards_of_rows_and_features(collectives: Collectives) -> None:
    """A rank has some rows of each chunk, or some features of each row, and its part of the dropout masks.

    Five rows are not a multiple of the ranks. If a chunk has one row, one rank has none.
    """
    scenario = of_rows(collectives=collectives)
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("around", [(), (LocalDataParallel(),)], ids=["two_axes", "three_axes"])
def test_a_script_computes_what_ranks_compute(around: tuple[Parallelism, ...], tmp_path: Path) -> None:
    """A script gathers shards only from ranks with the same stage."""
    scenario = of_rows(*around, dropout=0.0, rows=(8, 4))
    require_supported(scenario)
    script, differences = run_script(scenario, tmp_path)
    assert "neighbours = mesh[" in script
    assert differences.keys() == differences_of_traces(scenario).keys()


@pytest.mark.parametrize("sends_dtensors", [False, True])
@pytest.mark.parametrize("around", [(), (SHARDED_LAYERS,)], ids=["two_axes", "sharded"])
def test_a_script_with_dtensors_computes_what_ranks_compute(
    around: tuple[Parallelism, ...], sends_dtensors: bool, tmp_path: Path
) -> None:
    """A script calls `parallelize_module` before it keeps a rank's stages, shards those, and gathers DTensors within each."""
    rows = (16, 16) if around else (8, 4)
    scenario = of_rows(*around, kind=TensorParallel, width=4, dropout=0.0, rows=rows, sends_dtensors=sends_dtensors)
    require_supported(scenario)
    script, differences = run_script(scenario, tmp_path)
    assert script.index("    parallelize_module(") < script.index("PipelineStage(")
    assert not around or script.index("    parallelize_module(") < script.index("fully_shard(part") < script.index(
        "PipelineStage("
    )
    assert differences.keys() == differences_of_traces(scenario).keys()


@pytest.mark.parametrize("name", [*SCHEDULES, "presplit"])
@pytest.mark.parametrize("inner", ["gather", "ring", "experts"])
@pytest.mark.parametrize("around", [(), (LocalDataParallel(),)], ids=["two_axes", "three_axes"])
def test_a_script_exchanges_positions_and_rows_of_stages(
    around: tuple[Parallelism, ...], inner: str, name: str, tmp_path: Path
) -> None:
    """Only ranks of the same stage exchange keys, or rows for experts. Ranks pad chunks after they take their rows."""
    model = replace(DECODER, source=Tokens(vocabulary=5, learned_positions=True), head=Head())
    pipeline = replace(SCHEDULES["gpipe"], presplit=True) if name == "presplit" else SCHEDULES[name]
    scenario = a_scenario(inner, pipeline, *around, rows=(20, 12) if name == "presplit" else (16, 8), model=model)
    require_supported(scenario)
    _, differences = run_script(scenario, tmp_path)
    assert differences.keys() == differences_of_traces(scenario).keys()


@pytest.mark.parametrize("around", [DDP(), Replicate()], ids=["ddp", "replicate"])
@pytest.mark.parametrize("inner", ["experts", "dtensor"])
def test_a_script_replicates_stages_with_local_tensors(inner: str, around: Parallelism, tmp_path: Path) -> None:
    """A script clips and compares the local tensors that data parallelism makes of each stage's DTensors."""
    if inner == "experts":
        scenario = a_scenario(inner, Pipeline(), around, rows=(8, 8))
        layers = (ExpertParallel(storage=ExpertStorage.DTENSOR), *scenario.layout.parallelisms[1:])
    else:
        scenario = of_rows(around, kind=TensorParallel, width=4, dropout=0.0, rows=(8, 8))
        layers = (scenario.layout.parallelisms[0], Pipeline(), around)
    training = replace(scenario.training, data=Data(microbatches=(8,)))
    scenario = replace(scenario, training=training, layout=replace(scenario.layout, parallelisms=layers))
    require_supported(scenario)
    _, differences = run_script(scenario, tmp_path)
    assert differences.keys() == differences_of_traces(scenario).keys()


@pytest.mark.parametrize("around", [(), (LocalDataParallel(),)], ids=["two_axes", "three_axes"])
def test_scripts_do_not_clip_experts_of_dtensors_in_stages(around: tuple[Parallelism, ...]) -> None:
    """The reason names both kinds of parameters. No plan leaves layers out."""
    scenario = a_scenario("experts", Pipeline(), *around, rows=(8, 8))
    layers = (ExpertParallel(storage=ExpertStorage.DTENSOR), *scenario.layout.parallelisms[1:])
    scenario = replace(scenario, layout=replace(scenario.layout, parallelisms=layers))
    require_supported(scenario)
    with pytest.raises(CannotExport, match="plain tensors and the DTensors of each mesh"):
        script_of(scenario)


@pytest.mark.parametrize("balance", LoadBalancer)
def test_a_script_weights_chunks_by_positions(balance: LoadBalancer, tmp_path: Path) -> None:
    """One rank has three of five positions and the other has two, so the mean over them is not the mean of their means."""
    model = replace(DECODER, source=None, head=None)
    pipeline = replace(SCHEDULES["zbv"], static_shapes=True)
    scenario = clipped_scenario(
        model, {"pp": 2, "cp": 2}, ContextParallel(balance=balance), pipeline, microbatches=(4, 2), loss=Loss.MSE_MEAN
    )
    require_supported(scenario)
    _, differences = run_script(scenario, tmp_path)
    assert differences.keys() == differences_of_traces(scenario).keys()


def test_a_script_shards_features_of_masks_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Ranks of other stages hold no shard of a layer's features."""
    plan = LocalTensorParallel(
        plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
    )
    model = Model(features=4, layers=(Layer(width=4, dropout=0.25), Layer(width=4)))
    scenario = clipped_scenario(model, {"pp": 2, "tp": 2}, plan, SCHEDULES["gpipe"], microbatches=(4, 4), loss=Loss.MSE_MEAN)
    require_supported(scenario)
    _, differences = run_script(scenario, tmp_path)
    assert differences.keys() == differences_of_traces(scenario).keys()


@pytest.mark.parametrize("kind", [LocalTensorParallel, TensorParallel])
def test_a_script_shards_learned_positions(kind: type[PlannedParallelism], tmp_path: Path) -> None:
    """A stage calls the module of positions, because tensor parallelism changes its output."""
    plan = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS),) * 2
    sharded = kind(plan=plan, source=Split.ROWWISE, source_output=ActivationSharding.ROWS, head=Split.COLWISE)
    source = Tokens(vocabulary=5, learned_positions=True)
    model = Model(features=4, source=source, length=4, layers=(Layer(width=4),) * 2, head=Head())
    scenario = clipped_scenario(model, {"pp": 2, "tp": 2}, sharded, SCHEDULES["gpipe"], microbatches=(4, 4))
    require_supported(scenario)
    _, differences = run_script(scenario, tmp_path)
    assert differences.keys() == differences_of_traces(scenario).keys()


def test_a_script_shards_no_rows_of_chunks() -> None:
    """The masks of each chunk would have to be sharded by themselves."""
    with pytest.raises(CannotExport, match="dropout on sharded rows in a pipeline"):
        script_of(of_rows())


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_shapes_of_shards_are_inferred() -> None:
    """Given shapes are those of full activations, so tensor parallelism rules them out."""
    scenario = a_scenario("sequence", Pipeline(num_chunks=2, static_shapes=True))
    assert "static_shapes over tensor parallelism" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_layout(scenario.layout) == a_scenario("sequence", Pipeline(num_chunks=2)).layout


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_a_plan_has_an_entry_for_each_stage() -> None:
    """Otherwise one repair would add layers for the stages, and another would remove them for the plan."""
    scenario = a_scenario("dtensor", SCHEDULES["zbv"])
    short = replace(scenario.layout, parallelisms=(TensorParallel(), SCHEDULES["zbv"]))
    assert "fewer entries than stages" in (limit_reason(scenario.training, short) or "")
    assert repair_layout(short).parallelisms[0] == TensorParallel(plan=(LayerPlan(),) * 4)


@pytest.mark.torch(">=2.12", "its schedule puts neighbouring stages on one rank")
def test_faults_in_layers_are_planted_in_stages() -> None:
    """A rank has only the layers of its own stages."""
    verdict = check(of_rows(kind=TensorParallel, width=4, rows=(8, 4)), alter=mutant("row_output_averaged").plant)
    assert verdict.outcome is Outcome.DIVERGED


@pytest.mark.parametrize("name", ["tied_embedding_without_gradient", "vocabulary_mask_off_by_one"])
def test_faults_in_embeddings_are_planted_where_they_are_called(name: str) -> None:
    """The last stage has a tied head's weight under the embedding's name, but does not call the embedding."""
    scenario = a_scenario("dtensor", SCHEDULES["gpipe"], model=replace(EVEN, head=Head(tied=True)))
    require_supported(scenario)
    assert mutant(name).applies(scenario)
    assert check(scenario, alter=mutant(name).plant).outcome is Outcome.DIVERGED


@pytest.mark.torch(">=2.12", "its schedule puts neighbouring stages on one rank")
@pytest.mark.parametrize("presplit", [False, True])
def test_each_chunk_gets_rows_for_all_ranks(presplit: bool) -> None:
    """Ranks shard the rows of each chunk, so a repair that only makes microbatches even would not end."""
    scenario = of_rows(kind=TensorParallel, width=4, rows=(6, 2))
    plan, pipeline = scenario.layout.parallelisms
    layout = replace(scenario.layout, parallelisms=(plan, replace(pipeline, presplit=presplit)))
    assert "not a multiple of the ranks" in (limit_reason(scenario.training, layout) or "")
    assert fit_training(scenario.training, layout).data.microbatches == (8, 4)


def test_ranks_without_rows_recompute_at_the_same_point() -> None:
    """One of two ranks has the only row. Both multiply it by the dropout mask, because its backward starts the recomputation."""
    model = Model(features=2, layers=(Layer(width=4), Layer(width=4, dropout=0.25), Layer(width=4)))
    rows, columns = LayerPlan(output=ActivationSharding.ROWS), LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS)
    plan = LocalTensorParallel(plan=(rows, columns, LayerPlan()))
    scenario = clipped_scenario(model, {"pp": 2, "tp": 2}, plan, Pipeline(num_chunks=2, boundaries=(1,)), microbatches=(2, 2))
    layout = replace(scenario.layout, execution=Execution(checkpointing=Checkpointing.EVERY_LAYER))
    check(replace(scenario, layout=layout)).assert_equivalent()
