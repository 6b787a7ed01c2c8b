"""`fully_shard` with `dp_mesh_dims`: parameters and activations are DTensors, and gradients are summed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.scenario import (
    FSDP2,
    Adam,
    Attention,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    Experts,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    MeshDims,
    Model,
    Norm,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, TP
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.trace.stage import Stage
from support.exported import run_script
from support.verdicts import require_predicted

needs_mesh_dims = pytest.mark.skipif(is_torch_in("<2.12"), reason="fully_shard has dp_mesh_dims since torch 2.12")
SHARDS = FSDP2(mesh_dims=MeshDims.SHARD, gradient_divide_factor=1.0, sum_reductions=True)
REPLICATES = replace(SHARDS, mesh_dims=MeshDims.REPLICATE)
ROWS = Training(
    model=Model(features=4, layers=(Layer(width=8, norm=Norm.LAYER, dropout=0.5), Layer(width=3))),
    data=Data(microbatches=(8, 8)),
    loss=Loss.MSE_SUM,
    steps=2,
)
TOKENS = Training(
    model=Model(
        features=4,
        length=4,
        source=Tokens(vocabulary=7),
        layers=(Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=6)),
        head=Head(norm=Norm.RMS),
    ),
    data=Data(microbatches=(8, 4)),
    loss=CrossEntropy(),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=2,
)
WAYS = [
    *(pytest.param(SHARDS, sizes, id=f"shard {sizes}") for sizes in [(4,), (2, 2), (1,), (1, 2), (2, 1)]),
    *(pytest.param(REPLICATES, sizes, id=f"replicate {sizes}") for sizes in [(2,), (1,)]),
]


def scenario(training: Training, fsdp: FSDP2, sizes: tuple[int, ...]) -> Scenario:
    """A training on axes of the given sizes."""
    names = FSDP2.axes[len(sizes) - 1]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(fsdp,)))


@needs_mesh_dims
@pytest.mark.parametrize("training", [ROWS, TOKENS], ids=["rows", "tokens"])
@pytest.mark.parametrize(("fsdp", "sizes"), WAYS)
def test_parameters_on_the_full_mesh_train_like_one_device(training: Training, fsdp: FSDP2, sizes: tuple[int, ...]) -> None:
    """All calls are predicted. Sharded axes gather and reduce-scatter; replicated axes all-reduce."""
    require_predicted(scenario(training, replace(fsdp, wrapping=Wrapping.PER_LAYER, no_sync=True), sizes))
    require_predicted(scenario(training, replace(fsdp, reshard_after_forward=False, ignore_frozen=True), sizes))


@needs_mesh_dims
def test_reductions_of_expert_counts_are_not_predicted() -> None:
    """DTensor propagation may reduce them at any operation."""
    model = replace(TOKENS.model, layers=(Experts(hidden=6, num_experts=6, balance=0.1),))
    verdict = check(scenario(replace(TOKENS, model=model), SHARDS, (4,)))
    verdict.assert_equivalent()
    assert "expert counts" in verdict.unmodelled


@needs_mesh_dims
def test_replicated_parameters_are_never_gathered() -> None:
    """Each of four backwards reduces one unit."""
    calls = require_predicted(scenario(ROWS, REPLICATES, (2,))).calls[0]
    ops = [call.op for call in calls if call.stage is Stage.COMPUTE]
    assert (ops.count("all_reduce.sum"), ops.count("all_gather")) == (4, 0)


@needs_mesh_dims
@pytest.mark.parametrize(("fsdp", "sizes"), [(SHARDS, (2, 2)), (SHARDS, (2,)), (REPLICATES, (2,))])
@pytest.mark.parametrize("training", [ROWS, TOKENS], ids=["rows", "tokens"])
def test_the_exported_script_runs(training: Training, fsdp: FSDP2, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """It names the axes in DataParallelMeshDims."""
    script, _ = run_script(scenario(training, replace(fsdp, wrapping=Wrapping.PER_LAYER), sizes), tmp_path)
    assert "dp_mesh_dims=DataParallelMeshDims(" in script


@pytest.mark.skipif(is_torch_in("<2.13"), reason="torch has no group for reductions, or no mesh dims")
@pytest.mark.parametrize(
    ("option", "reason"),
    [("separate_reduce_group", "set_separate_reduce_scatter_group"), ("distributed_muon", "distributed Muon")],
)
def test_options_that_need_an_axis_that_shards(option: str, reason: str) -> None:
    """Replicated parameters have no shards. The repair turns the option off."""
    layout = scenario(ROWS, replace(REPLICATES, **{option: True}), (2,)).layout
    assert reason in (limit_reason(ROWS, layout) or "")
    assert repair_layout(layout) == scenario(ROWS, REPLICATES, (2,)).layout


def test_torch_without_mesh_dims_gets_a_mesh_of_data_axes() -> None:
    """Before torch 2.12 the scenario is unsupported."""
    layout = scenario(ROWS, SHARDS, (2,)).layout
    assert (repair_layout(layout) != layout) is is_torch_in("<2.12")


@needs_mesh_dims
def test_other_parallelisms_keep_their_own_axes() -> None:
    """Their parameters are not DTensors on the full mesh."""
    mesh = Mesh(axes=(Axis(name=DP, size=2), Axis(name=TP, size=2)))
    layout = Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(LayerPlan(), LayerPlan())), SHARDS))
    assert "DTensors on the full mesh" in (limit_reason(ROWS, layout) or "")
    assert repair_layout(layout).of(FSDP2) == (replace(SHARDS, mesh_dims=None),)


@needs_mesh_dims
def test_two_axes_cannot_both_replicate() -> None:
    """The nearest layout shards along one of them."""
    layout = scenario(ROWS, REPLICATES, (2, 2)).layout
    assert repair_layout(layout).of(FSDP2) == (SHARDS,)


@needs_mesh_dims
def test_a_divide_factor_other_than_one_is_found() -> None:
    """The loss is that of the full batch, so an average over four ranks is a quarter of the gradient."""
    verdict = check(scenario(ROWS, SHARDS, (4,)), alter=lambda setup: setup.model.set_gradient_divide_factor(4.0))  # type: ignore[operator]
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert float(verdict.divergence.actual) / float(verdict.divergence.expected) == pytest.approx(1 / 4)
