"""A router's bias in pipeline stages: updated once a step, by the choices of all chunks, microbatches and ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    AttentionExchange,
    Axis,
    Checkpointing,
    ContextParallel,
    CrossEntropy,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    Head,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Replicate,
    Replicator,
    Resume,
    Scenario,
    ScoreFunction,
    Split,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.worlds.trace.stage import Stage
from support.exported import run_script
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

LAYERS = (
    Experts(hidden=4, num_experts=4, top_k=2, scores=ScoreFunction.SIGMOID, norm=Norm.RMS, router_bias_rate=0.5),
    Experts(hidden=2, num_experts=3),
    Experts(hidden=2, num_experts=3, router_bias_rate=0.125),
    Experts(hidden=2, num_experts=5, dispatched=True, router_bias_rate=0.25),
)
WITHIN = (LayerPlan(split=Split.HEADS_OR_HIDDEN),) * len(LAYERS)
SHARDED_STAGES = FSDP2(wrapping=Wrapping.PER_LAYER, reshard_after_forward=False)


def a_scenario(*parallelisms: Parallelism, microbatches: tuple[int, int] = (8, 16), **axes: int) -> Scenario:
    """Three steps of two microbatches, by default with unequal sizes."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=4, layers=LAYERS, head=Head())
    data = Data(microbatches=microbatches)
    training = Training(model=model, data=data, loss=CrossEntropy(), optimizer=SGD(lr=1e-2, momentum=0.9), steps=3)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


GPIPE = Pipeline(num_chunks=2)
ZBV = Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2)
EQUAL = (16, 16)
LAYOUTS = {
    "gpipe": a_scenario(GPIPE, pp=2),
    "static shapes": a_scenario(Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=4, static_shapes=True), pp=2),
    "interleaved": a_scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2, num_chunks=2), pp=2),
    "zbv": a_scenario(ZBV, pp=2),
    "dual pipe v": a_scenario(Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4), pp=2),
    "averaged explicitly": a_scenario(ZBV, LocalDataParallel(), dp=2, pp=2),
    "ddp": a_scenario(replace(GPIPE, static_shapes=True), DDP(), microbatches=EQUAL, dp=2, pp=2),
    "replicate": a_scenario(GPIPE, Replicate(implementation=Replicator.FSDP), microbatches=EQUAL, dp=2, pp=2),
    "shards": a_scenario(ZBV, SHARDED_STAGES, microbatches=EQUAL, dp=2, pp=2),
    "replicas of shards": a_scenario(GPIPE, SHARDED_STAGES, microbatches=EQUAL, dp_replicate=2, dp_shard=2, pp=2),
    "over experts": a_scenario(ExpertParallel(), ZBV, pp=2, ep=2),
    "over positions": a_scenario(ContextParallel(exchange=AttentionExchange.GATHER), GPIPE, pp=2, cp=2),
    "within experts": a_scenario(LocalTensorParallel(plan=WITHIN), ZBV, pp=2, tp=2),
    "three axes": a_scenario(ExpertParallel(), GPIPE, LocalDataParallel(), dp=2, pp=2, ep=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_choose_as_one_device(name: str) -> None:
    """Losses, gradients, parameters and biases are equal, although shape inference runs the routers too."""
    scenario = LAYOUTS[name]
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_processes_choose_as_one_device() -> None:
    """Gloo computes what simulated ranks compute."""
    scenario = LAYOUTS["averaged explicitly"]
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize("checkpointing", [Checkpointing.EVERY_LAYER, Checkpointing.OFFLOAD])
def test_choices_of_a_recomputed_layer_count_once(checkpointing: Checkpointing) -> None:
    """The bias and the reductions of counts are as without recomputation."""
    scenario = LAYOUTS["averaged explicitly"]
    layout = replace(scenario.layout, execution=Execution(checkpointing=checkpointing))
    require_supported(replace(scenario, layout=layout))
    assert _sums(replace(scenario, layout=layout)) == _sums(scenario)


def test_stages_sum_choices_of_their_own_routers_once_a_step() -> None:
    """However many chunks and microbatches there are, a rank reduces each bias of its own stages once a step."""
    scenario = LAYOUTS["averaged explicitly"]
    require_supported(scenario)
    without = _with_layers(scenario, *(layer.with_fields(router_bias_rate=0.0) for layer in LAYERS))
    for rank, num_biases in enumerate((2, 1, 2, 1)):
        assert _sums(scenario, rank) - _sums(without, rank) == Counter(dict.fromkeys(range(3), num_biases))


def _sums(scenario: Scenario, rank: int = 0) -> Counter[int]:
    """How often a rank all-reduces a sum during forward and backward, by step. All such calls are predicted."""
    verdict = check(scenario)
    verdict.assert_equivalent()
    calls = (call for call in verdict.calls[rank] if call.op == "all_reduce.sum")
    return Counter(call.step for call in calls if call.stage is Stage.COMPUTE)


def _with_layers(scenario: Scenario, *layers: Experts) -> Scenario:
    training = scenario.training
    return replace(scenario, training=replace(training, model=replace(training.model, layers=layers)))


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_the_bias_is_in_a_checkpoint() -> None:
    """A pipeline saves the bias of each stage, and a training with fewer ranks resumes with it."""
    scenario = LAYOUTS["averaged explicitly"]
    resume = Resume(steps=2, layout=LAYOUTS["interleaved"].layout, flatten_optimizer_state_dict=True)
    check(replace(scenario, resume=resume)).assert_equivalent()


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("router_bias_counts_last_chunk", "the expert counts of the last chunk, not of the step"),
        ("router_bias_of_own_rows", "not by their sum over the 2 dp ranks"),
    ],
)
def test_wrong_counts_are_explained(planted: str, words: str) -> None:
    """The check finds a bias that is updated by other counts, and says by which."""
    model = Model(features=2, layers=(Experts(hidden=2, router_bias_rate=0.5),) * 2)
    scenario = LAYOUTS["averaged explicitly"]
    layout = replace(scenario.layout, parallelisms=(GPIPE, LocalDataParallel()))
    scenario = Scenario(training=Training(model=model, data=Data(microbatches=(8,)), steps=2), layout=layout)
    plant = mutant(planted).plant
    verdict = explained(check(scenario, alter=plant), alter=plant)
    assert verdict.diagnosis is not None, verdict.describe()
    assert verdict.diagnosis.cause is Cause.ROUTER_BIAS
    assert words in verdict.diagnosis.sentence


SCRIPTS = ("gpipe", "averaged explicitly", "ddp", "shards", "within experts")
WRITTEN_IN_EACH_RUN = ("averaged explicitly",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WRITTEN_IN_EACH_RUN else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_updates_the_bias_as_stages_do(name: str, tmp_path: Path) -> None:
    """It trains the same on several ranks as on one device, and exits with 0."""
    scenario = LAYOUTS[name]
    require_supported(scenario)
    _, printed = run_script(scenario, tmp_path, numbers=None)
    assert max(printed.values()) < 1e-9
