"""A router's bias for load balancing: updated once a step, by choices that all ranks count together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equivcheck import check
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.mutants.registry import mutant
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    AttentionExchange,
    Axis,
    Checkpointing,
    ContextParallel,
    CrossEntropy,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Head,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Loss,
    Mesh,
    MeshDims,
    Model,
    Norm,
    Parallelism,
    Replicate,
    Resume,
    Scenario,
    ScoreFunction,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.worlds.trace.pieces import full_tensors_of
from equivcheck.worlds.trace.stage import Stage
from numpy_reference import tokens
from support.exported import run_script
from support.verdicts import require_predicted

LAYERS = (
    Experts(hidden=4, num_experts=4, top_k=2, scores=ScoreFunction.SIGMOID, norm=Norm.RMS, router_bias_rate=0.5),
    Experts(hidden=2, num_experts=3, balance=0.5, router_bias_rate=0.125),
)
WITHIN = (LayerPlan(split=Split.HEADS_OR_HIDDEN),) * 2


def a_scenario(*parallelisms: Parallelism, loss: Loss | CrossEntropy | None = None, **axes: int) -> Scenario:
    """Three steps of two microbatches with unequal sizes."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=3, layers=LAYERS, head=Head())
    data = Data(microbatches=(4, 8))
    training = Training(model=model, data=data, loss=loss or CrossEntropy(), optimizer=SGD(lr=1e-2, momentum=0.9), steps=3)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


FULL_MESH = FSDP2(mesh_dims=MeshDims.SHARD, gradient_divide_factor=1.0, sum_reductions=True)
LAYOUTS = {
    "ddp": a_scenario(DDP(), dp=2),
    "replicate": a_scenario(Replicate(), dp=2),
    "fsdp1": a_scenario(FSDP1(), dp=2),
    "replicas of shards": a_scenario(FSDP2(wrapping=Wrapping.PER_LAYER), dp_replicate=2, dp_shard=2),
    "full mesh": a_scenario(FULL_MESH, dp=2, loss=Loss.LINEAR_SUM),
    "averaged explicitly": a_scenario(LocalDataParallel(), dp=2),
    "over experts": a_scenario(ExpertParallel(), DDP(), dp=2, ep=2),
    "units of experts": a_scenario(ExpertParallel(storage=ExpertStorage.DTENSOR), FSDP2(sum_reductions=True), dp=2, ep=2),
    "over positions": a_scenario(ContextParallel(exchange=AttentionExchange.GATHER), DDP(), dp=2, cp=2),
    "within experts": a_scenario(LocalTensorParallel(plan=WITHIN), FSDP2(), dp=2, tp=2),
    "tensor parallel": a_scenario(TensorParallel(plan=(LayerPlan(split=Split.NOT_IN_PLAN),) * 2), FSDP2(), dp=2, tp=2),
    "spmd": a_scenario(SPMD(), dp=2, loss=Loss.LINEAR_SUM),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_choose_as_one_device(name: str) -> None:
    """Losses, gradients, parameters and biases are equal, although the bias changes which experts later steps choose."""
    scenario = LAYOUTS[name]
    if (reason := why_unsupported(scenario)) is not None:
        pytest.skip(reason)  # this version of torch lacks the call
    check(scenario).assert_equivalent()


def test_the_bias_changes_choices() -> None:
    """Without the bias, the second step has another loss. Otherwise the tests here would say nothing."""
    training = LAYOUTS["ddp"].training
    layers = tuple(layer.with_fields(router_bias_rate=0.0) for layer in training.model.layers)
    without = replace(training, model=replace(training.model, layers=layers))
    found, other = (train(single_device_setup(each)).steps for each in (training, without))
    assert found[0].loss == other[0].loss
    assert found[1].loss != pytest.approx(other[1].loss, rel=1e-6)


def test_one_device_updates_the_bias_as_numpy() -> None:
    """After each step, the bias moves by the rate towards experts with fewer positions than the mean."""
    training = LAYOUTS["ddp"].training
    trace = train(single_device_setup(training))
    initial = {name: values.numpy() for name, values in material(training).parameters.items()}
    parameters = [initial, *(full_tensors_of(step.parameters) for step in trace.steps)]
    biases = {f"layers.{index}.router.expert_bias": np.zeros(layer.num_experts) for index, layer in enumerate(LAYERS)}
    for values, batches in zip(parameters, material(training).steps, strict=False):
        given = {**values, **biases}
        counts = [tokens.choice_counts(training.model, given, batch.inputs.numpy()) for batch in batches]
        for (name, bias), layer, counted in zip(list(biases.items()), LAYERS, zip(*counts, strict=True), strict=True):
            own = sum(counted)
            biases[name] = bias + layer.router_bias_rate * np.sign(np.mean(own) - own)
    buffers = full_tensors_of(trace.buffers)
    assert all(np.array_equal(buffers[name], bias) for name, bias in biases.items())
    assert any(bias.any() for bias in biases.values())


@pytest.mark.parametrize("checkpointing", [Checkpointing.EVERY_LAYER, Checkpointing.OFFLOAD])
def test_choices_of_a_recomputed_layer_count_once(checkpointing: Checkpointing) -> None:
    """The bias and the reductions of counts are as without recomputation."""
    scenario = LAYOUTS["replicas of shards"]
    layout = replace(scenario.layout, execution=Execution(checkpointing=checkpointing))
    require_predicted(replace(scenario, layout=layout))


def test_choices_are_summed_once_a_step_along_each_axis() -> None:
    """Ranks reduce the counts of both layers once a step, besides counts for the load-balancing loss in each microbatch."""
    scenario = LAYOUTS["over experts"]
    layers = tuple(layer.with_fields(router_bias_rate=0.0) for layer in scenario.training.model.layers)
    without = replace(scenario, training=replace(scenario.training, model=replace(scenario.training.model, layers=layers)))
    assert _sums(scenario) - _sums(without) == Counter(dict.fromkeys(range(3), 2 * 2))


def _sums(scenario: Scenario) -> Counter[int]:
    """How often the first rank all-reduces a sum during forward and backward, by step. All calls are predicted."""
    calls = (call for call in require_predicted(scenario).calls[0] if call.op == "all_reduce.sum")
    return Counter(call.step for call in calls if call.stage is Stage.COMPUTE)


def test_faults_of_a_bias_that_cannot_move_are_not_planted() -> None:
    """A router that chooses all experts counts them equally, so its bias stays zero."""
    fault, scenario = mutant("router_bias_in_weights"), LAYOUTS["ddp"]
    layers = tuple(layer.with_fields(num_experts=2, top_k=2) for layer in LAYERS)
    training = replace(scenario.training, model=replace(scenario.training.model, layers=layers))
    assert fault.applies(scenario)
    assert not fault.applies(replace(scenario, training=training))
    found = train(single_device_setup(training)).buffers
    assert not any(values.any() for name, values in full_tensors_of(found).items() if name.endswith("expert_bias"))


def test_the_bias_is_in_a_checkpoint() -> None:
    """A training that resumes under another layout chooses by the bias of the saved steps."""
    layout = LAYOUTS["replicas of shards"].layout
    resume = Resume(steps=2, layout=layout)
    check(replace(LAYOUTS["ddp"], resume=resume)).assert_equivalent()


SCRIPTS = ("ddp", "replicas of shards", "over experts", "over positions", "spmd")
WRITTEN_IN_EACH_RUN = ("replicas of shards",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WRITTEN_IN_EACH_RUN else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_updates_the_bias_as_ranks_do(name: str, tmp_path: Path) -> None:
    """It trains the same on several ranks as on one device, and exits with 0."""
    _, printed = run_script(LAYOUTS[name], tmp_path, numbers=None)
    assert max(printed.values()) < 1e-9
