"""A load-balancing loss for each sequence: the same however rows are split, so pipeline stages can have it, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equivcheck import check
from equivcheck.campaign.shrinking.simpler import changes_for, simpler_by
from equivcheck.diagnosis.explain import explained
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.reference.summation import split_steps
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    Attention,
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
    Replicate,
    Replicator,
    Scenario,
    ScoreFunction,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.training.loop import single_device_setup, train
from equivcheck.worlds.trace.stage import Stage
from support.exported import run_script
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

LAYERS = (
    Experts(
        hidden=4, num_experts=4, top_k=2, scores=ScoreFunction.SIGMOID, norm=Norm.RMS, balance=0.5, balance_per_sequence=True
    ),
    Attention(),
    Experts(hidden=2, num_experts=3, balance=1.0, balance_per_sequence=True),
    Experts(hidden=2, num_experts=5, dispatched=True, balance=0.25, balance_per_sequence=True, router_bias_rate=0.25),
)
WITHIN = (LayerPlan(split=Split.HEADS_OR_HIDDEN), LayerPlan(), *(LayerPlan(split=Split.HEADS_OR_HIDDEN),) * 2)
BESIDE = (LayerPlan(split=Split.NOT_IN_PLAN),) * len(LAYERS)


def a_scenario(
    *parallelisms: Parallelism, loss: Loss | CrossEntropy | None = None, microbatches: tuple[int, ...] = (8, 16), **axes: int
) -> Scenario:
    """Two steps, by default of two microbatches with unequal sizes."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=4, layers=LAYERS, head=Head())
    data = Data(microbatches=microbatches)
    # Steps on a sum must be small, or values grow, and so does their rounding.
    optimizer = SGD(lr=1e-5 if isinstance(loss, Loss) and not loss.is_mean else 1e-2, momentum=0.9)
    training = Training(model=model, data=data, loss=loss or CrossEntropy(), optimizer=optimizer, steps=2)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


def _of_dtensors(scenario: Scenario) -> Scenario:
    """Replace operations for which DTensor has no sharding strategy."""
    return replace(scenario, training=repair_training(scenario.training, scenario.layout))


GPIPE = Pipeline(num_chunks=2)
ZBV = Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2)
SHARDED_STAGES = FSDP2(wrapping=Wrapping.PER_LAYER, reshard_after_forward=False)
POSITIONS = ContextParallel(exchange=AttentionExchange.GATHER, balance=LoadBalancer.HEAD_TAIL)
EQUAL = (16, 16)
OTHERS = {
    "ddp": a_scenario(DDP(), dp=2),
    "sum loss": a_scenario(DDP(), loss=Loss.MSE_SUM, dp=2),
    "replicate": a_scenario(Replicate(), dp=2),
    "fsdp1": a_scenario(FSDP1(), dp=2),
    "replicas of shards": a_scenario(FSDP2(wrapping=Wrapping.PER_LAYER), dp_replicate=2, dp_shard=2),
    "averaged explicitly": a_scenario(LocalDataParallel(), dp=2),
    "over experts": a_scenario(ExpertParallel(), DDP(), dp=2, ep=2),
    "over positions": a_scenario(POSITIONS, DDP(), dp=2, cp=2),
    "rows before positions": a_scenario(DDP(), POSITIONS, dp=2, cp=2),
    "within experts": a_scenario(LocalTensorParallel(plan=WITHIN), FSDP2(), dp=2, tp=2),
    "tensor parallel": a_scenario(TensorParallel(plan=BESIDE), FSDP2(), dp=2, tp=2),
    "spmd": _of_dtensors(a_scenario(SPMD(), dp=2, loss=Loss.LINEAR_SUM)),
}
PIPELINES = {
    "gpipe": a_scenario(GPIPE, pp=2),
    "sum of chunks": a_scenario(GPIPE, loss=Loss.MSE_SUM, pp=2),
    "scaled by the schedule": a_scenario(Pipeline(num_chunks=4, scale_grads=True), loss=Loss.MSE_MEAN, microbatches=(16,), pp=2),
    "static shapes": a_scenario(Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=4, static_shapes=True), pp=2),
    "interleaved": a_scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2, num_chunks=2), pp=2),
    "zbv": a_scenario(ZBV, pp=2),
    "dual pipe v": a_scenario(Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4), pp=2),
    "presplit": a_scenario(Pipeline(num_chunks=2, presplit=True), pp=2),
    "ranks of stages": a_scenario(ZBV, LocalDataParallel(), dp=2, pp=2),
    "ddp stages": a_scenario(replace(GPIPE, static_shapes=True), DDP(), microbatches=EQUAL, dp=2, pp=2),
    "replicate stages": a_scenario(GPIPE, Replicate(implementation=Replicator.FSDP), microbatches=EQUAL, dp=2, pp=2),
    "sharded stages": a_scenario(ZBV, SHARDED_STAGES, microbatches=EQUAL, dp=2, pp=2),
    "stages over experts": a_scenario(ExpertParallel(), ZBV, pp=2, ep=2),
    "stages within experts": a_scenario(LocalTensorParallel(plan=WITHIN), ZBV, pp=2, tp=2),
    "stages of DTensors": a_scenario(TensorParallel(plan=BESIDE), replace(GPIPE, sends_dtensors=True), pp=2, tp=2),
    "three axes": a_scenario(ExpertParallel(), GPIPE, LocalDataParallel(), dp=2, pp=2, ep=2),
}
LAYOUTS = {**OTHERS, **PIPELINES}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_compute_the_loss_of_one_device(name: str) -> None:
    """Losses, gradients and parameters are equal."""
    scenario = LAYOUTS[name]
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_processes_compute_the_loss_of_one_device() -> None:
    """Gloo computes what simulated ranks compute."""
    check(PIPELINES["ranks of stages"], world="gloo").assert_equivalent()


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize("checkpointing", [Checkpointing.EVERY_LAYER, Checkpointing.OFFLOAD])
def test_a_recomputed_layer_adds_its_loss_once(checkpointing: Checkpointing) -> None:
    """Backward runs the router again, but the stage adds the loss of the first run only."""
    scenario = PIPELINES["gpipe"]
    check(
        replace(scenario, layout=replace(scenario.layout, execution=Execution(checkpointing=checkpointing)))
    ).assert_equivalent()


def _first_step(training: Training, num_parts: int, *, per_sequence: bool) -> tuple[float, np.ndarray]:
    """Return loss and gradients on one device, with each microbatch in equal parts that are microbatches of their own."""
    layers = tuple(layer.with_fields(balance_per_sequence=per_sequence and layer.balance > 0) for layer in LAYERS)
    training = replace(training, model=replace(training.model, layers=layers))
    parts = [[replace(part, whole=None) for part in step] for step in split_steps(training, num_parts)]
    step = train(single_device_setup(training), parts).steps[0]
    assert step.loss is not None
    return step.loss, step.gradients.values


@pytest.mark.parametrize("loss", [CrossEntropy(), Loss.MSE_MEAN])
def test_it_does_not_depend_on_the_split_into_microbatches(loss: Loss | CrossEntropy) -> None:
    """A loss over each microbatch does, so the comparison says something."""
    training = a_scenario(DDP(), loss=loss, dp=2).training
    expected, of_microbatch = _first_step(training, 1, per_sequence=True), _first_step(training, 1, per_sequence=False)
    for num_parts in (2, 4, 8):
        found, gradients = _first_step(training, num_parts, per_sequence=True)
        assert found == pytest.approx(expected[0], rel=1e-12)
        np.testing.assert_allclose(gradients, expected[1], rtol=1e-9, atol=1e-12)
        assert _first_step(training, num_parts, per_sequence=False)[0] != pytest.approx(of_microbatch[0], rel=1e-6)


def _sums(scenario: Scenario) -> Counter[int]:
    """How often the first rank all-reduces a sum during forward and backward, by step. All collective calls are predicted."""
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert not verdict.unmodelled or "collectives are predicted" in verdict.unmodelled
    calls = (call for call in verdict.calls[0] if call.op == "all_reduce.sum")
    return Counter(call.step for call in calls if call.stage is Stage.COMPUTE)


def _without_balance(scenario: Scenario) -> Scenario:
    layers = tuple(layer.with_fields(balance=0.0, balance_per_sequence=False) for layer in LAYERS)
    return replace(scenario, training=replace(scenario.training, model=replace(scenario.training.model, layers=layers)))


@pytest.mark.parametrize(("name", "num_sums"), [("ddp", 0), ("over experts", 0), ("over positions", 3 * 2)])
def test_only_ranks_with_parts_of_sequences_sum_counts(name: str, num_sums: int) -> None:
    """Context-parallel ranks sum them once for each layer and microbatch, and ranks with other rows never do."""
    scenario = OTHERS[name]
    assert _sums(scenario) - _sums(_without_balance(scenario)) == +Counter(dict.fromkeys((0, 1), num_sums))


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_stages_send_nothing_for_it() -> None:
    """Each stage starts the backward of its own layers' loss."""
    scenario = PIPELINES["ranks of stages"]
    assert _sums(scenario) == _sums(_without_balance(scenario))


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (a_scenario(POSITIONS, GPIPE, cp=2, pp=2), "the loss of a sequence depends on the positions of other ranks"),
        (a_scenario(Pipeline(num_chunks=3, presplit=True), pp=2), "padding rows would count for the experts"),
    ],
)
def test_what_stages_cannot_count_has_a_reason(scenario: Scenario, words: str) -> None:
    """The limit says why, and its repair leaves a scenario that is supported."""
    assert words in (why_unsupported(scenario) or "")
    repaired = replace(scenario, training=repair_training(scenario.training, scenario.layout))
    assert why_unsupported(repaired) is None


def test_a_finding_in_stages_shrinks_to_experts_without_it() -> None:
    """Both fields change at once, because stages have no other form of the loss, and this form needs a coefficient."""
    scenario, plain = PIPELINES["gpipe"], LAYERS[0].with_fields(balance=0.0, balance_per_sequence=False)
    simpler = [other for kind in changes_for(scenario) for other in simpler_by(kind, scenario)]
    assert any(plain in other.training.model.layers for other in simpler)


EXPLAINED = {
    "balance_of_own_rows": ("over positions", "own expert counts, not their sum over the 2 cp ranks"),
    "balance_counted_twice": ("gpipe", "is added twice"),
    "sequence_balance_over_microbatch": ("ddp", "is computed over a microbatch, not for each sequence"),
    "balance_gradient_summed_over_chunks": ("static shapes", "has a gradient multiplied by 4, the number of chunks"),
    "balance_of_last_stage_only": ("interleaved", "as if only the last stage added such losses"),
}


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_wrong_loss_is_explained(name: str) -> None:
    """The check finds the fault, and the diagnosis names it."""
    (layout, words), plant = EXPLAINED[name], mutant(name).plant
    verdict = explained(check(LAYOUTS[layout], alter=plant), alter=plant)
    assert verdict.diagnosis is not None, verdict.describe()
    assert verdict.diagnosis.cause is Cause.EXPERT_BALANCE
    assert words in verdict.diagnosis.sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("balance_of_own_rows", "the load-balancing loss of `layers.0` uses each rank's own expert counts"),
        ("choices_of_earlier_microbatches_counted", "use expert counts since the step began"),
    ],
)
def test_a_wrong_loss_next_to_one_for_each_sequence_is_explained(name: str, words: str) -> None:
    """The sentence names only the layer whose counts depend on a full microbatch."""
    scenario, plant = a_scenario(DDP(), dp=2), mutant(name).plant
    layers = (replace(LAYERS[0], balance_per_sequence=False), *LAYERS[1:])
    scenario = replace(scenario, training=replace(scenario.training, model=replace(scenario.training.model, layers=layers)))
    verdict = explained(check(scenario, alter=plant), alter=plant)
    assert verdict.diagnosis is not None, verdict.describe()
    assert words in verdict.diagnosis.sentence


SCRIPTS = ("ddp", "replicas of shards", "over experts", "over positions", "rows before positions", "spmd")
WRITTEN_IN_EACH_RUN = ("rows before positions", "zbv", "three axes")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in WRITTEN_IN_EACH_RUN else pytest.mark.slow) for name in (*SCRIPTS, *PIPELINES)],
)
def test_a_script_computes_the_loss_as_ranks_do(name: str, tmp_path: Path) -> None:
    """It trains the same on several ranks as on one device, and exits with 0."""
    scenario = LAYOUTS[name]
    require_supported(scenario)
    _, printed = run_script(scenario, tmp_path, numbers=None)
    assert max(printed.values()) < 1e-9
