"""Tensor parallelism on plain tensors as the innermost of three parallelisms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equivcheck import Scenario, check
from equivcheck.scenario import (
    DDP,
    FSDP2,
    ActivationSharding,
    Attention,
    AttentionExchange,
    ContextParallel,
    ExpertParallel,
    Experts,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    LoadBalancer,
    LocalTensorParallel,
    Loss,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Split,
    Tokens,
    Wrapping,
)
from support.clipped import clipped_scenario
from support.exported import differences_of_traces, run_script
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

REPLICATED, ROWS = ActivationSharding.REPLICATED, ActivationSharding.ROWS
SPLITS = {
    Attention(num_heads=2, num_kv_heads=2, head_dim=2, norm=Norm.RMS, dropout=0.25): Split.HEADS_OR_HIDDEN,
    GatedMLP(hidden=4, bias=True): Split.HEADS_OR_HIDDEN,
    Layer(width=4, residual=True, dropout=0.25): Split.COLWISE,
    Experts(hidden=4, num_experts=4, norm=Norm.RMS): Split.HEADS_OR_HIDDEN,
}
DECODER = Model(features=4, source=Tokens(vocabulary=5, padding=1), length=5, layers=tuple(SPLITS), head=Head(norm=Norm.RMS))
AROUND_TENSOR_PARALLEL: dict[str, tuple[str, Parallelism]] = {
    "gather": ("cp", ContextParallel(balance=LoadBalancer.HEAD_TAIL)),
    "ring": ("cp", ContextParallel(exchange=AttentionExchange.RING)),
    "experts": ("ep", ExpertParallel()),
}
OUTERMOST: dict[str, tuple[str, Parallelism]] = {
    "gpipe": ("pp", Pipeline(num_chunks=2)),
    "zbv": ("pp", Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2, num_chunks=2)),
    "ddp": ("dp", DDP(bucket_cap_mb=0.0001)),
    "fsdp2": ("dp", FSDP2(wrapping=Wrapping.PER_LAYER)),
}
DDP_STAGES = DDP(find_unused_parameters=True)
"""Stages infer their shapes inside tensor parallelism, and DDP must not rebuild its buckets after that pass."""


def planned(output: ActivationSharding, model: Model = DECODER) -> LocalTensorParallel:
    """All layers sharded, and a loss over sharded logits."""
    plan = tuple(LayerPlan(split=SPLITS.get(layer, Split.ROWWISE), output=output) for layer in model.layers)
    if model.source is None:
        return LocalTensorParallel(plan=plan)
    return LocalTensorParallel(plan=plan, source=Split.ROWWISE, source_output=output, head=Split.COLWISE, loss_parallel=True)


@pytest.mark.parametrize("outermost", OUTERMOST)
@pytest.mark.parametrize("middle", AROUND_TENSOR_PARALLEL)
def test_layers_spread_along_two_axes_equal_one_device(middle: str, outermost: str) -> None:
    """Stages, or data-parallel ranks, have layers with sharded features that compute a rank's own positions or rows."""
    (outer_axis, outer), (axis, parallelism) = OUTERMOST[outermost], AROUND_TENSOR_PARALLEL[middle]
    axes = {outer_axis: 2, axis: 2, "tp": 2}
    scenario = clipped_scenario(DECODER, axes, planned(ROWS), parallelism, outer, microbatches=(16, 8))
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("middle", ["ring", "experts"])
def test_processes_compute_the_same(middle: str) -> None:
    """Gloo computes what simulated ranks compute."""
    axis, parallelism = AROUND_TENSOR_PARALLEL[middle]
    parallelisms = planned(ROWS), parallelism, Pipeline(num_chunks=2)
    scenario = clipped_scenario(DECODER, {"pp": 2, axis: 2, "tp": 2}, *parallelisms, microbatches=(16, 8))
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


def of_ddp_stages(output: ActivationSharding, model: Model = DECODER, **options: Any) -> Scenario:
    """Two stages with sharded layers, on two data-parallel ranks each."""
    parallelisms = planned(output, model), Pipeline(num_chunks=2), DDP_STAGES
    return clipped_scenario(model, {"dp": 2, "pp": 2, "tp": 2}, *parallelisms, microbatches=(16, 8), **options)


@pytest.mark.parametrize("output", [REPLICATED, ROWS])
def test_ddp_averages_shards_of_stages(output: ActivationSharding) -> None:
    """Each stage has its own `DistributedDataParallel`, over ranks with the same stage and the same shards."""
    scenario = of_ddp_stages(output)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_a_script_of_sharded_ddp_stages_computes_what_ranks_compute(tmp_path: Path) -> None:
    """A script wraps each stage after its layers are sharded."""
    model = Model(features=4, layers=(Layer(width=4), Layer(width=4, norm=Norm.RMS)))
    scenario = of_ddp_stages(REPLICATED, model, loss=Loss.MSE_MEAN)
    require_supported(scenario)
    script, differences = run_script(scenario, tmp_path)
    assert script.count("DistributedDataParallel(") == 1
    assert differences.keys() == differences_of_traces(scenario).keys()
