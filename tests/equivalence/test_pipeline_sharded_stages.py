"""Pipelines whose stages `fully_shard` shards over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario, check
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.scenario import (
    FSDP2,
    ElementType,
    Layer,
    Loss,
    MixedPrecision,
    Model,
    Pipeline,
    PipelineSchedule,
    Wrapping,
    ZeroGrad,
)
from support.clipped import clipped_scenario
from support.exported import run_script
from support.staged import DECODER, PIPELINES
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

STAGES = {
    "whole": FSDP2(reshard_after_forward=False),
    "layers": FSDP2(wrapping=Wrapping.PER_LAYER, reshard_after_forward=False, explicit_prefetch=True),
    "resharded": FSDP2(wrapping=Wrapping.PER_LAYER, layers_per_unit=2, embedding_unit=True, head_unit=True),
}
FOUR = (Layer(width=2),) * 4
UNTIED = replace(DECODER, head=replace(DECODER.head, tied=False))


def a_scenario(
    pipeline: Pipeline, fsdp: FSDP2, axes: Mapping[str, int] | None = None, model: Model = UNTIED, **changes: object
) -> Scenario:
    """Two clipped steps of two microbatches."""
    fields = {"microbatches": (16, 16), "zero_grad": ZeroGrad.ZERO} | changes
    return clipped_scenario(model, axes or {"dp": 2, "pp": 2}, pipeline, fsdp, **fields)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", PIPELINES)
def test_sharded_stages_equal_one_device(name: str, stages: str) -> None:
    """Each schedule gathers a stage's parameters for its chunks, and reduces gradients at the end of each microbatch."""
    if PIPELINES[name].schedule is PipelineSchedule.ZBV and stages == "resharded":
        pytest.skip("zero-bubble schedules lose gradients of resharded stages (split_backward_of_resharded_stage)")
    scenario = a_scenario(PIPELINES[name], STAGES[stages])
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert "the schedule decides when they happen" in verdict.unmodelled


@pytest.mark.torch(">=2.15", "earlier schedules reduce gradients of FSDP stages in each step() call")
@pytest.mark.parametrize("presplit", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_gradients_reduced_in_the_last_call_are_scaled_once(name: str, presplit: bool) -> None:
    """With `no_sync`, three `step()` calls accumulate gradients that only the last one reduces and divides by the chunks."""
    pipeline = replace(PIPELINES[name], scale_grads=True, presplit=presplit)
    fsdp = FSDP2(no_sync=True, reshard_after_forward=False)
    rows = 14 if presplit else 16
    scenario = a_scenario(pipeline, fsdp, model=Model(features=2, layers=FOUR), loss=Loss.MSE_MEAN, microbatches=(rows,) * 3)
    check(scenario).assert_equivalent()


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_gradients_reduced_in_each_call_are_not_scaled() -> None:
    """Torch would divide gradients again that earlier `step()` calls have left."""
    pipeline, training = replace(PIPELINES["gpipe"], scale_grads=True), {"loss": Loss.MSE_MEAN}
    scenario = a_scenario(pipeline, FSDP2(), model=Model(features=2, layers=FOUR), **training)
    assert "torchtitan#1733" in (limit_reason(scenario.training, scenario.layout) or "")
    sizes = a_scenario(pipeline, FSDP2(no_sync=True), model=Model(features=2, layers=FOUR), microbatches=(16, 8), **training)
    assert "torchtitan#1733" in (limit_reason(sizes.training, sizes.layout) or "")


@pytest.mark.torch(">=2.15", "earlier schedules reduce gradients of FSDP stages in each step() call")
def test_a_script_reduces_gradients_in_the_last_call(tmp_path: Path) -> None:
    """A script passes `finalize_gradients`."""
    scenario = a_scenario(PIPELINES["gpipe"], FSDP2(no_sync=True, reshard_after_forward=False))
    script, _ = run_script(scenario, tmp_path)
    assert "finalize_gradients=number == 1" in script


@pytest.mark.parametrize("axes", [{"dp": 2, "pp": 1}, {"dp": 1, "pp": 2}, {"dp_replicate": 2, "dp_shard": 1, "pp": 2}])
def test_replicas_and_groups_of_one_rank_equal_one_device(axes: Mapping[str, int]) -> None:
    """Gradients are reduced over shards and replicas, but not over stages."""
    scenario = a_scenario(PIPELINES["gpipe"], FSDP2(replica_hook=True), axes)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_shards_of_a_tied_head_are_summed_over_ranks() -> None:
    """The first and the last stage share the embedding, and each rank sums its shards over both."""
    scenario = a_scenario(PIPELINES["gpipe"], FSDP2(), model=DECODER)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_processes_compute_the_same() -> None:
    """Gloo computes what simulated ranks compute."""
    scenario = a_scenario(PIPELINES["1f1b_of_uneven_stages"], STAGES["resharded"])
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


@pytest.mark.parametrize(("name", "stages"), [("gpipe", "whole"), ("zbv", "layers")])
def test_a_script_computes_what_ranks_compute(name: str, stages: str, tmp_path: Path) -> None:
    """A script shards each stage before the schedule gets it."""
    scenario = a_scenario(PIPELINES[name], replace(STAGES[stages], explicit_prefetch=False))
    require_supported(scenario)
    script, _ = run_script(scenario, tmp_path)
    assert "fully_shard(part, " in script


@pytest.mark.torch(">=2.12", "earlier versions have no neighbouring stages on one rank")
def test_two_stages_of_a_rank_share_no_weight() -> None:
    """`fully_shard` would make two parameters of the weight."""
    layers = (Layer(width=2), Layer(width=2, shares=0))
    pipeline = Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2)
    scenario = a_scenario(pipeline, FSDP2(), {"dp": 2, "pp": 1}, Model(features=2, layers=layers), loss=Loss.MSE_SUM)
    assert "a weight that two stages" in (limit_reason(scenario.training, scenario.layout) or "")
    repaired = repair_training(scenario.training, scenario.layout)
    assert [layer.shares for layer in repaired.model.layers] == [None, None]


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_stages_have_no_lower_precision() -> None:
    """The repaired layout is a pipeline of sharded stages."""
    scenario = a_scenario(Pipeline(num_chunks=2), FSDP2(mixed_precision=MixedPrecision(param=ElementType.BFLOAT16)))
    assert "of pipeline stages is not supported" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_layout(scenario.layout).parallelisms == (Pipeline(num_chunks=2), FSDP2())


@pytest.mark.torch(">=2.11", "earlier versions need a chunk for each stage")
def test_limits_of_torch_hold_for_single_stages() -> None:
    """Torch refuses uneven columns on the ranks of one stage only, so the other ranks wait, and no such run is tried."""
    columns = FSDP2(shard_last_dim=True)
    model = Model(features=2, layers=(Layer(width=1), Layer(width=1)))
    staged = clipped_scenario(model, {"dp": 2, "pp": 2}, Pipeline(), columns, loss=Loss.MSE_MEAN)
    whole = clipped_scenario(model, {"dp": 2}, columns, loss=Loss.MSE_MEAN)
    reasons = [limit_reason(each.training, each.layout, beyond=True) for each in (staged, whole)]
    assert "uneven shards" in (reasons[0] or "")
    assert reasons[1] is None
