"""Linears with a LoRA adapter: the base stays frozen, and the adapter learns as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equivcheck import Verdict, check
from equivcheck.campaign.shrinking.simpler import changes_for, simpler_by
from equivcheck.layouts.base.limits.repairs import with_trained_bases, with_widths
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.mutants.registry import mutant
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    AdamW,
    Axis,
    Checkpointing,
    ContextParallel,
    CrossEntropy,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    LoRALinear,
    Loss,
    Mesh,
    MeshDims,
    Model,
    Parallelism,
    Pipeline,
    Replicate,
    Resume,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.worlds.trace.pieces import full_tensors_of
from support.exported import run_script
from support.supported import require_mended, require_supported

LAYERS = (LoRALinear(rank=2, alpha=4.0), LoRALinear(rank=3, residual=False), GatedMLP(hidden=4, residual=False))
WITHIN, ROWS = LayerPlan(split=Split.HEADS_OR_HIDDEN), ActivationSharding.ROWS
BY_COLUMNS, BY_INPUTS = LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE)
SPLIT = (BY_COLUMNS, BY_INPUTS, WITHIN)
WITH_ROWS = (LayerPlan(split=Split.COLWISE, output=ROWS), LayerPlan(split=Split.ROWWISE, output=ROWS), LayerPlan(output=ROWS))
BY_FEATURES = (LayerPlan(), LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), WITHIN)


def a_scenario(*parallelisms: Parallelism, loss: Loss | CrossEntropy | None = None, **axes: int) -> Scenario:
    """Three steps of two microbatches with unequal sizes."""
    model = Model(features=4, source=Tokens(vocabulary=8), length=4, layers=LAYERS, head=Head())
    data = Data(microbatches=(4, 8))
    training = Training(model=model, data=data, loss=loss or CrossEntropy(), optimizer=SGD(lr=1e-2, momentum=0.9), steps=3)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


def with_rows(kind: type[LocalTensorParallel | TensorParallel]) -> Parallelism:
    """A plan whose activations between layers are sharded by positions."""
    return kind(plan=WITH_ROWS, source=Split.COLWISE, source_output=ROWS, head=Split.COLWISE)


LAYOUTS = {
    "ddp": a_scenario(DDP(), dp=2),
    "replicate": a_scenario(Replicate(), dp=2),
    "flat parameters": a_scenario(FSDP1(use_orig_params=True), dp=2),
    "flat parameters of layers": a_scenario(FSDP1(use_orig_params=True, wrapping=Wrapping.PER_LAYER), dp=2),
    "replicas of shards": a_scenario(FSDP2(wrapping=Wrapping.PER_LAYER), dp_replicate=2, dp_shard=2),
    "without frozen parameters": a_scenario(FSDP2(ignore_frozen=True), dp=2),
    "full mesh": a_scenario(
        FSDP2(mesh_dims=MeshDims.SHARD, gradient_divide_factor=1.0, sum_reductions=True), dp=2, loss=Loss.LINEAR_SUM
    ),
    "averaged explicitly": a_scenario(LocalDataParallel(), dp=2),
    "over positions": a_scenario(ContextParallel(), DDP(), dp=2, cp=2),
    "tensor parallel": a_scenario(TensorParallel(plan=SPLIT), tp=2),
    "tensor parallel and sharded": a_scenario(TensorParallel(plan=SPLIT), FSDP2(), dp=2, tp=2),
    "sequence parallel": a_scenario(with_rows(TensorParallel), tp=2),
    "split between layers": a_scenario(TensorParallel(plan=BY_FEATURES), tp=2),
    "plain tensors": a_scenario(LocalTensorParallel(plan=SPLIT), DDP(), dp=2, tp=2),
    "plain tensors by positions": a_scenario(with_rows(LocalTensorParallel), tp=2),
    "plain tensors between layers": a_scenario(LocalTensorParallel(plan=BY_FEATURES), tp=2),
    "spmd": a_scenario(SPMD(), dp=2, loss=Loss.LINEAR_SUM),
    "stages": a_scenario(Pipeline(num_chunks=2), pp=2),
}


UNPREDICTED = ("spmd", "stages")
"""Layouts without a prediction for this training: placements of SPMD's gradients, and sends between stages."""


def require_equal(scenario: Scenario) -> Verdict:
    """Require that ranks end with the values of one device, unless this version of torch is too old."""
    require_supported(scenario)
    verdict = check(scenario)
    require_mended(verdict)
    verdict.assert_equivalent()
    return verdict


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_adapters_as_one_device(name: str) -> None:
    """Losses, gradients and parameters are equal. All collective calls are predicted if the layout predicts any."""
    verdict = require_equal(LAYOUTS[name])
    assert name in UNPREDICTED or not verdict.unmodelled


@pytest.mark.parametrize("name", ["tensor parallel", "plain tensors by positions", "replicas of shards"])
def test_a_recomputed_adapter_communicates_as_predicted(name: str) -> None:
    """Backward gathers the inputs of both the base and the adapter again."""
    scenario = LAYOUTS[name]
    layout = replace(scenario.layout, execution=Execution(checkpointing=Checkpointing.EVERY_LAYER))
    assert not require_equal(replace(scenario, layout=layout)).unmodelled


def test_only_the_adapter_is_trained() -> None:
    """From the first step on, both weights of an adapter have gradients and change. Decay does not change the base."""
    training = replace(LAYOUTS["ddp"].training, optimizer=AdamW(lr=1e-2, weight_decay=0.5))
    initial = {name: values.numpy() for name, values in material(training).parameters.items()}
    first = train(single_device_setup(training)).steps[0]
    gradients, parameters = full_tensors_of(first.gradients), full_tensors_of(first.parameters)
    for index in range(2):
        base, *adapter = (f"layers.{index}.{name}.weight" for name in ("base", "lora_a", "lora_b"))
        assert base not in gradients
        assert np.array_equal(parameters[base], initial[base])
        for name in adapter:
            assert np.abs(gradients[name]).max() > 1e-6
            assert not np.array_equal(parameters[name], initial[name])


@pytest.mark.parametrize("wrapping", [Wrapping.ROOT_ONLY, Wrapping.PER_LAYER])
def test_a_flat_parameter_is_frozen_or_trained_as_a_whole(wrapping: Wrapping) -> None:
    """Without `use_orig_params`, FSDP1 refuses a frozen base next to its adapter. The repair trains the base."""
    scenario = a_scenario(FSDP1(use_orig_params=False, wrapping=wrapping), dp=2)
    assert "both frozen and trained" in (why_unsupported(scenario) or "")
    repaired = repair_training(scenario.training, scenario.layout)
    assert not any(layer.frozen_base for layer in repaired.model.layers)
    check(replace(scenario, training=repaired)).assert_equivalent()


@pytest.mark.parametrize("outer", [DDP(), Replicate(), FSDP1(use_orig_params=True)], ids=lambda outer: outer.tag)
def test_parallelisms_of_local_tensors_unfreeze_the_base(outer: Parallelism) -> None:
    """The frozen base gets a gradient, which is a known issue. A trained base is equal."""
    scenario = a_scenario(TensorParallel(plan=SPLIT), outer, dp=2, tp=2)
    assert check(scenario).known == "local_tensors_unfreeze"
    require_equal(replace(scenario, training=with_trained_bases(scenario.training)))


def test_an_adapter_next_to_experts_is_trained() -> None:
    """Ranks with different experts have equal adapters."""
    scenario = a_scenario(ExpertParallel(), DDP(), dp=2, ep=2)
    model = replace(scenario.training.model, layers=(LAYERS[0], Experts(hidden=2, num_experts=4)))
    require_equal(replace(scenario, training=replace(scenario.training, model=model)))


def test_an_adapter_is_in_a_checkpoint() -> None:
    """A training resumes under another layout with the frozen base and the trained adapter."""
    resume = Resume(steps=2, layout=LAYOUTS["replicas of shards"].layout)
    require_equal(replace(LAYOUTS["ddp"], resume=resume))


def test_larger_widths_include_a_larger_rank() -> None:
    """A repair that rounds widths up also gives each rank a row of the adapter's first weight."""
    layers = with_widths(LAYOUTS["ddp"].training, 5).model.layers
    assert [layer.rank for layer in layers if isinstance(layer, LoRALinear)] == [5, 5]
    assert LoRALinear(rank=30).rounded_up(7).rank == 7


def test_an_adapter_is_shrunk_away() -> None:
    """Shrinking replaces the layer by a linear layer, and also tries a smaller rank."""
    scenario = LAYOUTS["ddp"]
    tried = [each.training.model.layers for change in changes_for(scenario) for each in simpler_by(change, scenario)]
    assert any(all(isinstance(layer, Layer) for layer in layers) for layers in tried)
    assert any(isinstance(layers[0], LoRALinear) and layers[0].rank == 1 for layers in tried)


@pytest.mark.parametrize("name", ["adapter_scale_divided_by_ranks", "adapter_gradient_not_reduced"])
def test_a_fault_in_an_adapter_needs_an_adapter_that_is_split(name: str) -> None:
    """The mutants apply to split layers with an adapter, but not to replicated layers or other models."""
    split = LAYOUTS["tensor parallel"]
    replicated = a_scenario(TensorParallel(plan=(LayerPlan(),) * 3), tp=2)
    layers = (Layer(width=4), Layer(width=4), LAYERS[-1])
    plain = replace(split, training=replace(split.training, model=replace(split.training.model, layers=layers)))
    assert [mutant(name).applies(scenario) for scenario in (split, replicated, plain)] == [True, False, False]


SCRIPTS = ("ddp", "flat parameters", "replicas of shards", "tensor parallel", "plain tensors", "spmd", "stages")
WRITTEN_IN_EACH_RUN = ("tensor parallel",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WRITTEN_IN_EACH_RUN else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_trains_the_adapter_as_ranks_do(name: str, tmp_path: Path) -> None:
    """It trains the same on several ranks as on one device, and exits with 0."""
    require_equal(LAYOUTS[name])
    _, printed = run_script(LAYOUTS[name], tmp_path, numbers=None)
    assert max(printed.values()) < 1e-9
