"""Pipelines whose layers other parallelisms spread over ranks."""

from __future__ import annotations

import pytest

from equivcheck import Scenario, check
from equivcheck.scenario import (
    Attention,
    AttentionExchange,
    ContextParallel,
    ExpertParallel,
    Experts,
    GatedMLP,
    Head,
    Layer,
    LoadBalancer,
    LocalDataParallel,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Tokens,
)
from support.clipped import clipped_scenario
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=5, padding=1),
    length=5,
    layers=(
        Attention(num_heads=2, num_kv_heads=2, head_dim=2, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=3, bias=True),
        Layer(width=4, residual=True, dropout=0.25),
        Experts(hidden=3, num_experts=3, norm=Norm.RMS),
    ),
    head=Head(norm=Norm.RMS),
)
SCHEDULES = {
    "gpipe": Pipeline(num_chunks=2),
    "zbv": Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2),
}
INNER: dict[str, tuple[str, Parallelism]] = {
    "gather": ("cp", ContextParallel(balance=LoadBalancer.HEAD_TAIL)),
    "ring": ("cp", ContextParallel(exchange=AttentionExchange.RING)),
    "experts": ("ep", ExpertParallel()),
}


def a_scenario(inner: str, pipeline: Pipeline, *around: Parallelism) -> Scenario:
    """Two clipped steps of two microbatches of unequal size."""
    axis, parallelism = INNER[inner]
    axes = {**({"dp": 2} if around else {}), "pp": 2, axis: 2}
    return clipped_scenario(DECODER, axes, parallelism, pipeline, *around, microbatches=(16, 8))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("inner", INNER)
def test_spread_layers_in_stages_equal_one_device(inner: str, name: str) -> None:
    """Stages send a rank's positions, or its rows."""
    scenario = a_scenario(inner, SCHEDULES[name])
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert "each chunk communicates" in verdict.unmodelled


@pytest.mark.parametrize("inner", ["gather", "experts"])
def test_three_axes_equal_one_device(inner: str) -> None:
    """Gradients are averaged over data-parallel ranks, which hold the same stage and the same shards."""
    scenario = a_scenario(inner, SCHEDULES["gpipe"], LocalDataParallel())
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_processes_compute_the_same() -> None:
    """Gloo computes what simulated ranks compute."""
    scenario = a_scenario("ring", SCHEDULES["gpipe"])
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()
