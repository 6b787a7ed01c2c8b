"""Experts whose rows ranks multiply by one `grouped_mm`, while one device computes one expert after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    AnyLayer,
    Axis,
    CrossEntropy,
    Data,
    ElementType,
    ExpertParallel,
    Experts,
    Head,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    LowPrecision,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Precision,
    Scenario,
    Split,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.experts.module import GatedExperts
from support.exported import run_script
from support.supported import require_supported
from support.verdicts import require_predicted

needs_grouped_mm = pytest.mark.skipif(is_torch_in("<2.10"), reason="torch has no grouped_mm")
GROUPED = Experts(hidden=8, num_experts=5, norm=Norm.RMS, bias=True, dispatched=True, grouped=True)
"""Five experts and few tokens, so that some experts get no row."""
WEIGHS_INPUT = replace(GROUPED, top_k=2, weighs_input=True, shared=True, bias=False)
BFLOAT16, FLOAT64 = (MixedPrecision(param=kind) for kind in (ElementType.BFLOAT16, ElementType.FLOAT64))
PLAN = (LayerPlan(split=Split.HEADS_OR_HIDDEN),) * 2


def scenario(parallelism: Parallelism, axis: str, size: int, layer: AnyLayer = GROUPED, features: int = 4) -> Scenario:
    """One step with two microbatches of tokens."""
    model = Model(features=features, source=Tokens(vocabulary=7), length=1, layers=(layer, layer), head=Head())
    data = Data(microbatches=(4, 2))
    training = Training(model=model, data=data, loss=CrossEntropy(), precision=Precision.FLOAT32)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=size),)), parallelisms=(parallelism,)))


LAYOUTS = {
    "ddp": (DDP(bucket_cap_mb=1e-4), "dp", 2),
    "fsdp2": (FSDP2(wrapping=Wrapping.PER_LAYER), "dp", 2),
    "experts without rows": (ExpertParallel(), "ep", 2),
    "rank without experts": (ExpertParallel(), "ep", 4),
    "pipeline": (Pipeline(), "pp", 2),
    "partial sums": (LocalTensorParallel(plan=PLAN), "tp", 2),
}


@needs_grouped_mm
def test_a_rank_without_experts_uses_its_empty_parameters_once() -> None:
    """Torch's pass for weights raises if a stage uses a parameter twice, as an operand of `grouped_mm` and in a sum."""
    model = Model(features=4, length=2, layers=(Layer(width=4), replace(GROUPED, num_experts=3)))
    training = Training(model=model, data=Data(microbatches=(16,)), precision=Precision.FLOAT32)
    stages = Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, num_chunks=2)
    mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="ep", size=4)))
    example = Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(ExpertParallel(), stages)))
    require_supported(example)
    check(example).assert_equivalent()


@needs_grouped_mm
@pytest.mark.parametrize("layer", [GROUPED, WEIGHS_INPUT], ids=["biased", "weighs_input"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_with_grouped_products_equal_one_device(name: str, layer: Experts) -> None:
    """Values are those of one expert after the other, and all calls are predicted, also in buckets of one parameter."""
    parallelism, axis, size = LAYOUTS[name]
    rows = (4, 4) if size == 4 else (4, 2)
    found = scenario(parallelism, axis, size, layer)
    found = replace(found, training=replace(found.training, data=Data(microbatches=rows)))
    if name == "pipeline":  # no sends are predicted
        check(found).assert_equivalent()
    else:
        require_predicted(found)


@needs_grouped_mm
def test_only_ranks_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single-device run does not use the operation under test."""
    calls: list[int] = []
    honest = functional.grouped_mm

    def counted(rows: torch.Tensor, *given: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return honest(rows, *given, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", counted)
    check(scenario(DDP(), "dp", 1)).assert_equivalent()
    assert len(calls) == 3 * 2 * 2  # projections, layers, microbatches


@needs_grouped_mm
@pytest.mark.parametrize("counts", [(0, 3, 0, 2), (5, 0, 0, 0), (0, 0, 0, 0), ()], ids=str)
def test_groups_without_rows_change_nothing(counts: tuple[int, ...]) -> None:
    """An expert, a rank or a device without rows: outputs and gradients are those of one expert after the other."""
    module = GatedExperts(replace(GROUPED, num_experts=4), 4, len(counts))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, generator=generator)
    rows, found = torch.rand(sum(counts), 4, generator=generator).requires_grad_(), []
    for module.grouped in (False, True):
        module.zero_grad()
        outputs = module(rows, counts=torch.tensor(counts, dtype=torch.int64))
        outputs.square().sum().backward()
        gradients = (torch.zeros_like(value) if value.grad is None else value.grad for value in module.parameters())
        found.append([outputs, *gradients])
    torch.testing.assert_close(found[1], found[0])


ALL_CHOSEN = Experts(hidden=8, top_k=2, dispatched=True, grouped=True)
"""Experts between which no position chooses, so that rounded scores cannot change the choice."""


@needs_grouped_mm
@pytest.mark.parametrize("layer", [ALL_CHOSEN, replace(ALL_CHOSEN, bias=True, weighs_input=True)], ids=["plain", "biased"])
@pytest.mark.parametrize("fsdp", [FSDP1(mixed_precision=BFLOAT16), FSDP2(mixed_precision=BFLOAT16)], ids=["fsdp1", "fsdp2"])
@pytest.mark.parametrize("precision", Precision)
def test_products_in_bfloat16_equal_those_of_one_device(fsdp: Parallelism, layer: Experts, precision: Precision) -> None:
    """One device rounds to bfloat16 at the same places, so the tolerance is that of any layer in bfloat16."""
    found = scenario(fsdp, "dp", 2, layer, features=8)
    check(replace(found, training=replace(found.training, precision=precision))).assert_equivalent()


def test_experts_that_are_chosen_do_not_round() -> None:
    """If one of two experts is chosen, or the choices count, rounded scores may change the result."""
    for layer in (ALL_CHOSEN, replace(ALL_CHOSEN, top_k=1), replace(ALL_CHOSEN, balance=0.1), replace(ALL_CHOSEN, num_experts=3)):
        refused = why_unsupported(scenario(FSDP2(mixed_precision=BFLOAT16), "dp", 2, replace(layer, grouped=False), features=8))
        assert refused is None if layer == ALL_CHOSEN else "rounds to other element types" in (refused or "")


@needs_grouped_mm
@pytest.mark.parametrize(
    ("changed", "reason", "kept"),
    [
        (
            replace(scenario(DDP(), "dp", 2), training=replace(scenario(DDP(), "dp", 2).training, precision=Precision.FLOAT64)),
            "float64 is not supported",
            True,
        ),
        (scenario(DDP(), "dp", 2, features=6), "multiple of 16 bytes", False),
        (scenario(FSDP2(mixed_precision=BFLOAT16), "dp", 2, ALL_CHOSEN), "multiple of 16 bytes", False),
        (scenario(FSDP2(mixed_precision=FLOAT64), "dp", 2, ALL_CHOSEN), "float64 is not supported", False),
        (scenario(DDP(autocast=LowPrecision.BFLOAT16), "dp", 2, ALL_CHOSEN), "torch.autocast", False),
        (scenario(DDP(), "dp", 2, replace(GROUPED, hidden=6)), "multiple of 16 bytes", False),
        (scenario(LocalTensorParallel(plan=PLAN), "tp", 2, replace(GROUPED, hidden=4)), "multiple of 16 bytes", False),
        (scenario(LocalTensorParallel(plan=PLAN), "tp", 4), "multiple of 16 bytes", False),
    ],
    ids=[
        "float64",
        "features",
        "bfloat16",
        "computes in float64",
        "autocast",
        "hidden",
        "hidden of a rank",
        "no hidden features",
    ],
)
def test_what_torch_refuses_has_limits(changed: Scenario, reason: str, kept: bool) -> None:
    """The reason says what does not fit, and the repair is the nearest training that runs."""
    assert reason in (why_unsupported(changed) or "")
    training = repair_training(changed.training, changed.layout)
    assert why_unsupported(replace(changed, training=training)) is None
    assert all(isinstance(layer, Experts) and layer.grouped is kept for layer in training.model.layers)


@needs_grouped_mm
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [(4, 6, torch.float32), (6, 4, torch.float32), (0, 4, torch.float32), (4, 4, torch.float64)],
    ids=["inputs", "outputs", "no outputs", "float64"],
)
def test_torch_refuses_what_the_limits_say(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """If torch accepts more, the limits can go."""
    weight, rows = torch.zeros(2, outputs, inputs, dtype=dtype), torch.zeros(3, inputs, dtype=dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"strides|Float32"):
        functional.grouped_mm(
            rows, weight.transpose(-2, -1), offs=torch.tensor([1, 3], dtype=torch.int32)
        ).square().sum().backward()


@needs_grouped_mm
@pytest.mark.parametrize("name", ["ddp", "experts without rows"])
def test_offsets_that_are_not_cumulative_are_named(name: str) -> None:
    """On ranks with own rows, and on ranks that get rows from others."""
    parallelism, axis, size = LAYOUTS[name]
    found = scenario(parallelism, axis, size)
    plant = mutant("offsets_not_cumulative").plant
    diagnosis = explained(check(found, alter=plant), alter=plant).diagnosis
    assert diagnosis is not None
    assert diagnosis.cause is Cause.EXPERT_ROWS
    assert "not their running total" in diagnosis.sentence


@needs_grouped_mm
@pytest.mark.parametrize("name", ["ddp", "experts without rows", "partial sums"])
@pytest.mark.parametrize("layer", [GROUPED, WEIGHS_INPUT], ids=["biased", "weighs_input"])
def test_a_script_groups_as_the_module_does(name: str, layer: Experts, tmp_path: Path) -> None:
    """It calls `grouped_mm`, trains the same on two ranks, and exits with 0."""
    parallelism, axis, size = LAYOUTS[name]
    text, printed = run_script(scenario(parallelism, axis, size, layer), tmp_path, numbers=None)
    assert "functional.grouped_mm(" in text
    assert max(printed.values()) < 1e-4


def test_flat_parameters_are_refused_by_versions_that_check_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.10 requires addresses that are multiples of 16 bytes, and views of flat parameters do not have them."""
    from packaging.version import Version

    from equivcheck.system import torch_version

    found = scenario(FSDP1(), "dp", 2)
    for installed, reason in (("2.9.1", "no such function"), ("2.10.0", "address"), ("2.11.0", None)):
        monkeypatch.setattr(torch_version, "_installed", lambda installed=installed: Version(installed))
        refused = why_unsupported(found)
        assert reason in refused if reason and refused else refused is reason
