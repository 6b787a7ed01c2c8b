"""Limits of resuming from a checkpoint, and their repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from equivcheck.layouts.composition.limits import (
    can_resume,
    repair_layout_for_resume,
    repair_training_for_resume,
    why_unsupported,
)
from equivcheck.layouts.composition.resume_limits import CHECKPOINT_LIMITS, flattenings
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    Adagrad,
    AdamW,
    AuxiliaryLinear,
    Axis,
    Compression,
    ContextParallel,
    Data,
    Execution,
    ExpertParallel,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Precision,
    Replicate,
    Resume,
    Scenario,
    ShardingStrategy,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.strategies import layouts, scenarios
from equivcheck.system import torch_version

PLAIN = Training(model=Model(features=4, layers=(Layer(width=4), Layer(width=4))), data=Data(microbatches=(4,)), steps=2)
PLAN = (LayerPlan(), LayerPlan())
ROWS = TensorParallel(plan=(LayerPlan(output=ActivationSharding.ROWS), LayerPlan()))
ZERO = DDP(zero_redundancy=True, parameters_as_bucket_view=True)


def layout(*parallelisms: Parallelism) -> Layout:
    """Layout with two ranks along each axis."""
    axes = tuple(Axis(name=parallelism.axes[0][0], size=2) for parallelism in reversed(parallelisms))
    return Layout(mesh=Mesh(axes=axes), parallelisms=parallelisms)


def resuming(first: Layout, second: Layout, training: Training = PLAIN, *, flatten: bool = False) -> Scenario:
    """A scenario with one step under each layout."""
    return Scenario(training=training, layout=second, resume=Resume(layout=first, flatten_optimizer_state_dict=flatten))


def with_last_layer(**changes: object) -> Model:
    """The plain model with another last layer."""
    return replace(PLAIN.model, layers=(PLAIN.model.layers[0], replace(PLAIN.model.layers[1], **changes)))  # type: ignore[arg-type]


PLAIN_DDP = layout(DDP())
HYBRID = Layout(
    mesh=Mesh(axes=(Axis(name="dp_replicate", size=2), Axis(name="dp_shard", size=1))),
    parallelisms=(FSDP1(strategy=ShardingStrategy.HYBRID_SHARD),),
)
FROZEN = replace(PLAIN, model=with_last_layer(frozen=True))


@pytest.mark.parametrize(
    "other",
    [
        layout(DDP(compression=Compression.FP16)),
        layout(Replicate(compression=Compression.FP16)),
        layout(ZERO),
        layout(TensorParallel(plan=PLAN), DDP()),
        HYBRID,
    ],
)
def test_a_layout_that_cannot_resume_says_why(other: Layout) -> None:
    """Resuming is unsupported in both directions, a layout without a checkpoint is supported, and the repair keeps the mesh."""
    assert why_unsupported(Scenario(training=PLAIN, layout=other)) is None
    for scenario in (resuming(other, PLAIN_DDP), resuming(PLAIN_DDP, other)):
        assert (why_unsupported(scenario) or "").startswith("checkpoint: ")
    nearest = repair_layout_for_resume(other)
    assert nearest.mesh == other.mesh
    assert why_unsupported(resuming(nearest, PLAIN_DDP)) is None


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (replace(PLAIN, model=with_last_layer(auxiliary=AuxiliaryLinear.EVEN_STEPS)), "takes no part"),
        (replace(PLAIN, optimizer=ASGD()), "count in float32"),
        (replace(FROZEN, optimizer=Adagrad()), "Adagrad with frozen"),
        (replace(FROZEN, model=with_last_layer(frozen=True, norm=Norm.RMS)), "SequenceParallel"),
    ],
)
def test_a_training_that_cannot_resume_says_why(training: Training, reason: str) -> None:
    """A training with one feature meets each limit, and the repair removes that feature."""
    first = layout(ROWS)
    second = layout(DDP(find_unused_parameters=True))
    assert reason in (why_unsupported(resuming(first, second, training)) or "")
    assert why_unsupported(resuming(first, second, repair_training_for_resume(training, first, second))) is None


@pytest.mark.parametrize(
    "training",
    [PLAIN, FROZEN, replace(PLAIN, optimizer=Adagrad()), replace(PLAIN, optimizer=ASGD(), precision=Precision.FLOAT32)],
)
def test_limits_are_no_wider_than_they_must_be(training: Training) -> None:
    """A training next to a limit stays supported."""
    assert why_unsupported(resuming(layout(FSDP2()), layout(FSDP1()), training)) is None


@pytest.mark.parametrize(("installed", "supported"), [("2.11.0", False), ("2.12.1", True), ("2.13.0", True), ("2.14.1", False)])
def test_momentum_that_is_pending_a_sum_is_not_saved(monkeypatch: pytest.MonkeyPatch, installed: str, supported: bool) -> None:
    """Partial momentum cannot be saved. SGD without momentum, or with redistributed gradients, can resume."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version(installed))
    momentum = replace(PLAIN, optimizer=SGD(momentum=0.9), loss=Loss.LINEAR_SUM)
    left, redistributed = layout(SPMD(redistribute_gradients=False)), layout(SPMD())
    limit = next(limit for limit in CHECKPOINT_LIMITS if "momentum" in limit.reason)

    assert limit.applies(momentum, left)
    assert not limit.applies(momentum, redistributed)
    assert not limit.applies(limit.repair(momentum, left), left)
    assert ("momentum" in (why_unsupported(resuming(left, redistributed, momentum)) or "")) is not supported


@pytest.mark.torch(">=2.13", "before, such stages are refused, or their gradients are right")
def test_stages_that_get_no_gradient_leave_no_state() -> None:
    """Behind frozen layers, only a zero-bubble schedule drops gradients, and only if no earlier layer is trained."""
    mesh = Mesh(axes=(Axis(name="pp", size=2),))
    zero_bubble, plain = (
        Layout(mesh=mesh, parallelisms=(Pipeline(schedule=schedule, num_chunks=2),))
        for schedule in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.GPIPE)
    )
    behind = replace(PLAIN, model=replace(PLAIN.model, layers=(replace(PLAIN.model.layers[0], frozen=True), Layer(width=4))))

    assert "zero-bubble" in (why_unsupported(resuming(zero_bubble, plain, behind, flatten=True)) or "")
    assert why_unsupported(resuming(plain, plain, behind, flatten=True)) is None
    assert why_unsupported(resuming(zero_bubble, plain, FROZEN, flatten=True)) is None
    assert why_unsupported(Scenario(training=behind, layout=zero_bubble)) is None
    assert repair_training_for_resume(behind, zero_bubble, plain) == PLAIN


def test_repairs_of_two_layouts_come_to_an_end() -> None:
    """Repairs end although one layout needs a fused optimizer for its graph and the other a loop."""
    step = replace(layout(SPMD()), execution=Execution(whole_step=True))
    partly = layout(TensorParallel(plan=(LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.NOT_IN_PLAN))))
    fused = replace(PLAIN, optimizer=AdamW(implementation=Implementation.FUSED))

    for first, second in ((step, partly), (partly, step)):
        assert why_unsupported(resuming(first, second, repair_training_for_resume(fused, first, second))) is None


@pytest.mark.usefixtures("of_torch_213")
def test_optimizer_state_is_nested_or_flattened_as_both_layouts_allow() -> None:
    """Stages need flattened optimizer state and flat parameters need nested state, so these two cannot be combined."""
    stages, flat = layout(Pipeline()), layout(FSDP1(use_orig_params=False))
    assert flattenings(PLAIN_DDP, layout(FSDP2())) == (False, True)
    assert flattenings(PLAIN_DDP, stages) == (True,)
    assert flattenings(flat, PLAIN_DDP) == (False,)
    assert flattenings(stages, flat) == ()
    assert "parameter groups" in (why_unsupported(resuming(stages, PLAIN_DDP)) or "")
    assert why_unsupported(resuming(stages, PLAIN_DDP, flatten=True)) is None
    assert "use_orig_params" in (why_unsupported(resuming(PLAIN_DDP, flat, flatten=True)) or "")


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(layouts())
def test_every_layout_has_a_nearest_that_can_resume(drawn: Layout) -> None:
    """Every layout has a repair that can resume, on the same mesh if possible; layouts that can resume stay as they are."""
    nearest = repair_layout_for_resume(drawn)
    assert can_resume(nearest)
    replaced = drawn.has(LocalTensorParallel) and drawn.has(LocalDataParallel, ContextParallel, ExpertParallel, Pipeline)
    assert nearest.mesh == (Mesh(axes=(Axis(name="dp", size=drawn.mesh.num_ranks),)) if replaced else drawn.mesh)
    assert (nearest == drawn) == can_resume(drawn)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(scenarios(resumes=st.just(True)))
def test_generated_resumes_are_supported(scenario: Scenario) -> None:
    """Generated resumes respect the limits of both layouts and of the change between them."""
    assert why_unsupported(scenario) is None
