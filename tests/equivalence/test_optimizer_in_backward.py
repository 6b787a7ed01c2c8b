"""Updates by hooks during backward give the same parameters as an update after backward on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario, check
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    AdamW,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Distribution,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Parallelism,
    ParameterGroup,
    Pipeline,
    Replicate,
    Split,
    StepLR,
    TensorParallel,
    Training,
    Wrapping,
    ZeroGrad,
)
from equivcheck.scenario.mesh import DP, PP, REPLICATE, SHARD, TP
from support.exported import run_script
from support.verdicts import require_predicted

IN_BACKWARD = Execution(optimizer_in_backward=True)
UNITS = FSDP2(wrapping=Wrapping.PER_LAYER)
PLAN = (LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE))
TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=6), Layer(width=4))),
    data=Data(microbatches=(8, 4), last_window=1),
    optimizer=AdamW(weight_decay=0.1),
    loss=Loss.LINEAR_SUM,
    groups=(ParameterGroup(lr_factor=0.5),),
    schedule=StepLR(),
    steps=3,
)


def scenario(*parallelisms: Parallelism, axes: tuple[str, ...] = (DP,), training: Training = TRAINING) -> Scenario:
    """A training with several microbatches, groups and a schedule on axes of two ranks."""
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in axes))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms, execution=IN_BACKWARD))


LAYOUTS = [
    scenario(UNITS),
    scenario(FSDP2(), axes=(REPLICATE, SHARD)),
    scenario(replace(UNITS, no_sync=True, cpu_offload=True)),
    scenario(LocalTensorParallel(plan=PLAN), axes=(TP,)),
    scenario(TensorParallel(plan=PLAN), UNITS, axes=(DP, TP)),
]

BY_PROPAGATION = scenario(SPMD(distribution=Distribution.FULLY_SHARD))


@pytest.mark.parametrize("found", LAYOUTS, ids=lambda found: found.layout.name)
def test_the_time_of_the_update_changes_neither_numbers_nor_calls(found: Scenario) -> None:
    """Gradients are recorded when the hook gets them."""
    require_predicted(found)


def test_hooks_get_gradients_with_the_placements_of_their_parameters() -> None:
    """Other hooks redistribute a DTensor's gradient before its accumulation."""
    check(BY_PROPAGATION).assert_equivalent()


@pytest.mark.parametrize(
    "training",
    [
        replace(TRAINING, clipping=ClipValue(clip_value=0.01)),
        replace(TRAINING, zero_grad=ZeroGrad.ZERO, optimizer=SGD(momentum=0.9)),
    ],
    ids=["clipped", "zeroed"],
)
def test_hooks_clip_by_value_and_gradients_may_be_zeroed(training: Training) -> None:
    """Clipping by value needs one parameter only."""
    require_predicted(scenario(UNITS, training=training))


@pytest.mark.parametrize("found", [LAYOUTS[0], BY_PROPAGATION], ids=lambda found: found.layout.name)
def test_the_exported_script_updates_in_backward(found: Scenario, tmp_path: Path) -> None:
    """It registers a hook for each parameter."""
    clipped = replace(found, training=replace(found.training, clipping=ClipValue(clip_value=0.01)))
    script, _ = run_script(clipped, tmp_path)
    assert "register_post_accumulate_grad_hook(update)" in script


@pytest.mark.parametrize(
    "parallelism", [DDP(), FSDP1(), LocalDataParallel(), Replicate(), replace(UNITS, distributed_muon=True), Pipeline()], ids=str
)
def test_gradients_that_are_incomplete_in_hooks_are_refused(parallelism: Parallelism) -> None:
    """The hook would update with the gradient of one rank, or of one chunk of a microbatch."""
    axes = (PP,) if isinstance(parallelism, Pipeline) else (DP,)
    assert "optimizer_in_backward" in str(why_unsupported(scenario(parallelism, axes=axes)))


def test_clipping_by_norm_is_refused() -> None:
    """The norm is known after backward only."""
    clipped = scenario(UNITS, training=replace(TRAINING, clipping=ClipNorm()))
    assert "clipping by norm" in str(why_unsupported(clipped))
