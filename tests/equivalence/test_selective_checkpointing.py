"""Selective activation checkpointing and activation offload change no numbers under any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario, check
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    Attention,
    Axis,
    Checkpointing,
    ContextParallel,
    CrossEntropy,
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
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import CP, DP, EP, PP, TP
from support.exported import run_script
from support.verdicts import require_predicted

SELECTIVE = Execution(checkpointing=Checkpointing.SELECTIVE)
OFFLOAD = Execution(checkpointing=Checkpointing.OFFLOAD)
UNITS = FSDP2(wrapping=Wrapping.PER_LAYER, sum_reductions=True)
HEADS = (LayerPlan(split=Split.HEADS_OR_HIDDEN), LayerPlan(split=Split.HEADS_OR_HIDDEN))
DENSE = (Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=8))
SPARSE = (Attention(num_heads=2, num_kv_heads=2), Experts(hidden=4, num_experts=2))


def scenario(*parallelisms: Parallelism, axes: tuple[str, ...], sparse: bool = False) -> Scenario:
    """A token model on axes of two ranks."""
    model = Model(features=4, length=4, source=Tokens(vocabulary=8), layers=SPARSE if sparse else DENSE, head=Head())
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in axes))
    training = Training(model=model, data=Data(microbatches=(8, 4)), loss=CrossEntropy(), steps=2)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms, execution=SELECTIVE))


LAYOUTS = [
    scenario(DDP(), axes=(DP,)),
    scenario(FSDP1(wrapping=Wrapping.PER_LAYER), axes=(DP,)),
    scenario(UNITS, axes=(DP,)),
    pytest.param(scenario(SPMD(), axes=(DP,)), marks=pytest.mark.torch(">=2.11", "earlier versions refuse a cross-entropy here")),
    scenario(TensorParallel(plan=HEADS), UNITS, axes=(DP, TP)),
    scenario(LocalTensorParallel(plan=HEADS), axes=(TP,)),
    scenario(ContextParallel(), axes=(CP,)),
    scenario(ExpertParallel(storage=ExpertStorage.PLAIN), UNITS, axes=(DP, EP), sparse=True),
    pytest.param(
        scenario(ExpertParallel(storage=ExpertStorage.DTENSOR), UNITS, axes=(DP, EP), sparse=True),
        marks=pytest.mark.torch(">=2.10", "gathers of recomputed expert units are not predicted on torch 2.9"),
    ),
]


@pytest.mark.parametrize("found", LAYOUTS, ids=lambda found: found.layout.name)
def test_kept_products_change_neither_numbers_nor_calls(found: Scenario) -> None:
    """Calls are those of other checkpointing."""
    require_predicted(found)


@pytest.mark.parametrize("found", LAYOUTS, ids=lambda found: found.layout.name)
def test_offload_changes_neither_numbers_nor_calls(found: Scenario) -> None:
    """Backward reads from host memory what forward has saved, such as gathered weights."""
    require_predicted(replace(found, layout=replace(found.layout, execution=OFFLOAD)))


def pipelined(schedule: PipelineSchedule) -> Scenario:
    """Four stages on two ranks, two chunks for each microbatch."""
    training = Training(
        model=Model(features=2, layers=(Layer(width=2, activation=Activation.TANH),) * 4), data=Data(microbatches=(8,))
    )
    pipeline = Pipeline(schedule=schedule, stages_per_rank=2, num_chunks=4)
    layout = Layout(mesh=Mesh(axes=(Axis(name=PP, size=2),)), parallelisms=(pipeline,), execution=SELECTIVE)
    return Scenario(training=training, layout=layout)


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_stages_recompute_in_one_backward() -> None:
    """A schedule that computes all gradients of a chunk at once can be checkpointed selectively."""
    check(pipelined(PipelineSchedule.INTERLEAVED)).assert_equivalent()


@pytest.mark.torch(">=2.12", "neighbouring stages of one rank cannot exchange messages over gloo")
@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZBV])
def test_stages_offload_under_any_schedule(schedule: PipelineSchedule) -> None:
    """A schedule with two backward passes reads the saved tensors twice."""
    found = pipelined(schedule)
    check(replace(found, layout=replace(found.layout, execution=OFFLOAD))).assert_equivalent()


@pytest.mark.usefixtures("of_torch_213")
@pytest.mark.parametrize(
    "schedule", [PipelineSchedule.ZBV, PipelineSchedule.DUAL_PIPE_V, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE]
)
def test_schedules_with_two_backward_passes_are_refused(schedule: PipelineSchedule) -> None:
    """Torch recomputes a selectively checkpointed layer once. The repair recomputes all results instead."""
    found = pipelined(schedule)
    assert "two backward passes" in (why_unsupported(found) or "")
    execution = fit_scenario(found).layout.execution
    assert execution.checkpointing is Checkpointing.EVERY_LAYER


@pytest.mark.parametrize("layers", [(Layer(width=3), Layer(width=2)), DENSE], ids=["linear", "tokens"])
def test_the_exported_script_keeps_the_products(layers: tuple[Layer, ...], tmp_path: Path) -> None:
    """It passes a context_fn to each checkpoint."""
    script, _ = run_script(_of_layers(layers), tmp_path)
    assert "torch.ops.aten.addmm.default" in script


@pytest.mark.parametrize("layers", [(Layer(width=3), Layer(width=2)), DENSE], ids=["linear", "tokens"])
def test_the_exported_script_offloads(layers: tuple[Layer, ...], tmp_path: Path) -> None:
    """Each layer computes inside `save_on_cpu`."""
    found = _of_layers(layers)
    script, _ = run_script(replace(found, layout=replace(found.layout, execution=OFFLOAD)), tmp_path)
    assert "with save_on_cpu():" in script


def _of_layers(layers: tuple[Layer, ...]) -> Scenario:
    found = scenario(UNITS, axes=(DP,))
    if not isinstance(layers[0], Layer):
        return found
    plain = Training(model=Model(features=4, layers=layers), data=Data(microbatches=(4,)), loss=Loss.MSE_SUM)
    return replace(found, training=plain)
