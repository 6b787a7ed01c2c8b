"""A trained parameter of shape []: the layouts that take it train it as one device does, the others refuse it by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from equivcheck import Outcome, Scenario, check
from equivcheck.checking.beyond import check_beyond
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    ActivationSharding,
    Adam,
    AdamW,
    Axis,
    ClipNorm,
    Compression,
    Data,
    Distribution,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    LowPrecision,
    Mesh,
    Model,
    Parallelism,
    ParameterGroup,
    ParameterSelection,
    Pipeline,
    PipelineSchedule,
    PlannedParallelism,
    Precision,
    Replicate,
    Replicator,
    ShardingStrategy,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.strategies import scenarios
from support.exported import run_script
from support.supported import require_supported
from support.verdicts import require_predicted

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = (Layer(width=4, activation=Activation.TANH), Layer(width=2))
TRAINING = Training(
    model=Model(features=4, layers=LAYERS, offset=True, scale=True),
    data=Data(microbatches=(4, 4)),
    loss=Loss.MSE_SUM,
    groups=(ParameterGroup(select=ParameterSelection.ODD_LAYERS, lr_factor=2.0),),
    clipping=ClipNorm(max_norm=0.1),
    steps=3,
)
FOREACH = replace(TRAINING, optimizer=AdamW(implementation=Implementation.FOREACH))
FUSED = replace(TRAINING, optimizer=Adam(implementation=Implementation.FUSED))
LINEAR = replace(TRAINING, loss=Loss.LINEAR_SUM)
LAST_FROZEN = replace(TRAINING, model=replace(TRAINING.model, layers=(LAYERS[0], Layer(width=2, frozen=True))))
FLOAT32 = replace(TRAINING, precision=Precision.FLOAT32)
UNGROUPED = replace(FLOAT32, groups=())
PLAN = TensorParallel(
    plan=(LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE)),
)
ZBV = Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=4)
SHARDED = SPMD(distribution=Distribution.FULLY_SHARD)
BY_FSDP = Replicate(implementation=Replicator.FSDP)


def scenario(*parallelisms: Parallelism, training: Training = TRAINING) -> Scenario:
    """A training on two ranks along the axis of each parallelism, the innermost first."""
    names = [parallelism.axes[-1] if _is_hybrid(parallelism) else parallelism.axes[0] for parallelism in reversed(parallelisms)]
    axes = tuple(Axis(name=name, size=2) for name in sum(names, start=()))
    if ZBV in parallelisms:
        layers = (Layer(width=4), Layer(width=4), *training.model.layers)
        training = replace(training, model=replace(training.model, layers=layers))
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=parallelisms))


def _is_hybrid(parallelism: Parallelism) -> bool:
    return isinstance(parallelism, FSDP1) and parallelism.strategy.is_hybrid


@pytest.mark.parametrize(
    "example",
    [
        scenario(DDP(bucket_cap_mb=0.0001)),
        scenario(DDP(bucket_cap_mb=0.0001), training=LAST_FROZEN),
        scenario(DDP(zero_redundancy=True, parameters_as_bucket_view=True), training=FOREACH),
        scenario(DDP(autocast=LowPrecision.BFLOAT16), training=FLOAT32),
        scenario(DDP(compression=Compression.FP16), training=FLOAT32),
        scenario(Replicate(bucket_cap_mb=0.0001)),
        scenario(SPMD()),
        scenario(SPMD(), training=LINEAR),
        scenario(PLAN, training=FOREACH),
        scenario(PLAN, training=FUSED),
        scenario(PLAN, DDP(bucket_cap_mb=0.0001)),
        scenario(PLAN, Replicate()),
    ],
    ids=lambda example: example.layout.name,
)
def test_a_scale_is_trained_and_its_calls_are_expected(example: Scenario) -> None:
    """Every rank has the scale of one device at each step, and communicates what is predicted."""
    require_supported(example)
    require_predicted(example)


@pytest.mark.parametrize(
    "example",
    [
        scenario(SHARDED),
        scenario(SHARDED, training=FOREACH),
        scenario(SPMD(redistribute_gradients=False), training=replace(FUSED, clipping=None)),
        scenario(Pipeline(num_chunks=2)),
        scenario(Pipeline(num_chunks=2, static_shapes=True), training=LAST_FROZEN),
        scenario(ZBV),
    ],
    ids=lambda example: example.layout.name,
)
def test_a_scale_is_trained(example: Scenario) -> None:
    """Also beside parameters that are sharded, and in the last stage alone, wherever that is."""
    require_supported(example)
    assert check(example).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(
    ("parallelisms", "words"),
    [
        *(((FSDP1(strategy=strategy),), "FSDP doesn't support scalar parameters") for strategy in ShardingStrategy),
        ((FSDP1(use_orig_params=False, wrapping=Wrapping.PER_LAYER),), "FSDP doesn't support scalar parameters"),
        ((FSDP2(),), "fully_shard doesn't support scalar parameters"),
        ((FSDP2(wrapping=Wrapping.PER_LAYER),), "fully_shard doesn't support scalar parameters"),
        ((PLAN, FSDP2()), "fully_shard doesn't support scalar parameters"),
        ((BY_FSDP,), "fully_shard doesn't support scalar parameters"),
    ],
    ids=str,
)
def test_what_torch_refuses_is_a_limit_that_quotes_it(parallelisms: tuple[Parallelism, ...], words: str) -> None:
    """The layout says that it cannot run it in the words of the error that every rank raises beyond the limit."""
    example = scenario(*parallelisms, training=UNGROUPED)
    if limit_reason(replace(UNGROUPED, model=replace(UNGROUPED.model, scale=False)), example.layout) is not None:
        pytest.skip("this version of torch has not that layout")
    assert words in (limit_reason(example.training, example.layout) or "")
    assert words in check(example, beyond=True).reason
    assert check_beyond(example).outcome is Outcome.UNSUPPORTED


@pytest.mark.parametrize("name", layout_names())
def test_a_layout_takes_a_scale_with_anything_else_or_never(name: str) -> None:
    """Generated scenarios with a scale are equivalent or on file, under each layout that does not refuse it."""

    @settings(deadline=None, max_examples=max(3, settings().max_examples // 33), suppress_health_check=list(HealthCheck))
    @given(scenarios(layouts=(name,), max_ranks=4))
    def equal(drawn: Scenario) -> None:
        training = drawn.training
        assume(training.optimizer.updates_vectors)
        scaled = fit_scenario(replace(drawn, training=replace(training, model=replace(training.model, scale=True))))
        shards = drawn.layout.has(FSDP1) or drawn.layout.has(FSDP2) or _by_fsdp(drawn.layout)
        refuses = shards or any(plan.loss_parallel for plan in drawn.layout.of(PlannedParallelism))
        if drawn.resume is None:
            assert scaled is not None
            assert scaled.training.model.scale is not refuses
        if scaled is not None and not refuses:
            check(scaled).assert_no_finding()

    equal()


def _by_fsdp(layout: Layout) -> bool:
    return any(replicate.implementation is Replicator.FSDP for replicate in layout.of(Replicate))


@pytest.mark.parametrize(
    "example",
    [scenario(DDP()), scenario(SHARDED), scenario(PLAN), scenario(ZBV)],
    ids=lambda example: example.layout.name,
)
@pytest.mark.parametrize("numbers", Numbers)
def test_scripts_have_the_scale(example: Scenario, numbers: Numbers, tmp_path: Path) -> None:
    """Exported scripts of either kind train it, read it, and agree."""
    require_supported(example)
    _, printed = run_script(example, tmp_path, numbers=numbers)
    assert {f"step {step} {what} scale" for step in range(3) for what in ("gradient", "clipped gradient", "parameter")} <= set(
        printed
    )
