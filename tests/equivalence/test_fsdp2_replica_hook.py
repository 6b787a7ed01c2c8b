"""`fully_shard` on the sharding axis, with a hook that reduces gradients over replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario
from equivcheck.layouts.composition.limits import repair_layout
from equivcheck.scenario import (
    FSDP2,
    Adam,
    Axis,
    Data,
    ElementType,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Layer,
    Layout,
    Loss,
    Mesh,
    MixedPrecision,
    Model,
    Precision,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import EP, REPLICATE, SHARD
from support.exported import run_script
from support.verdicts import require_predicted

HOOKED = FSDP2(replica_hook=True)
TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=3), Layer(width=2))),
    data=Data(microbatches=(8, 8)),
    optimizer=Adam(),
    steps=2,
)


def scenario(fsdp: FSDP2, *sizes: int, **changes: object) -> Scenario:
    """Two microbatches on replicas and shards, or on shards only."""
    names = FSDP2.axes[len(sizes) - 1]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    return Scenario(training=replace(TRAINING, **changes), layout=Layout(mesh=mesh, parallelisms=(fsdp,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (4,)], ids=str)
@pytest.mark.parametrize("loss", [Loss.MSE_SUM, Loss.MSE_MEAN])
def test_a_hook_reduces_like_replicas(sizes: tuple[int, ...], precision: Precision, loss: Loss) -> None:
    """With an average by ranks, with a divide factor, and for each unit. All calls are predicted."""
    require_predicted(scenario(HOOKED, *sizes, precision=precision, loss=loss))
    summed = replace(HOOKED, wrapping=Wrapping.PER_LAYER, gradient_divide_factor=1.0, sum_reductions=True, no_sync=True)
    require_predicted(scenario(summed, *sizes, precision=precision, loss=loss))


def test_the_hook_runs_in_each_backward() -> None:
    """`set_requires_all_reduce` is about replicas that `fully_shard` knows."""
    ops = [call.op for call in require_predicted(scenario(replace(HOOKED, all_reduce_once=True), 2, 1)).calls[0]]
    assert ops.count("all_reduce.sum") == 4


def test_the_hook_only_sums_gradients_of_expert_units() -> None:
    """Their divide factor is already that of all ranks."""
    names = (REPLICATE, SHARD, EP)
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in names))
    layout = Layout(mesh=mesh, parallelisms=(ExpertParallel(storage=ExpertStorage.DTENSOR), replace(HOOKED, sum_reductions=True)))
    model = Model(features=2, length=2, layers=(Experts(hidden=2, num_experts=2),))
    require_predicted(Scenario(training=replace(TRAINING, model=model), layout=layout))


@pytest.mark.parametrize("fsdp", [HOOKED, replace(HOOKED, gradient_divide_factor=1.0, sum_reductions=True)])
def test_the_exported_script_sets_the_hook(fsdp: FSDP2, tmp_path: Path) -> None:
    """It is set on each layer and on the root."""
    script, _ = run_script(scenario(replace(fsdp, wrapping=Wrapping.PER_LAYER), 2, 1), tmp_path)
    assert script.count("set_all_reduce_hook(reduce_over_replicas)") == 2


def test_a_layout_in_lower_precision_has_no_hook() -> None:
    """The single-device run does not round like a hook."""
    policy = MixedPrecision(reduce=ElementType.BFLOAT16)
    layout = scenario(replace(HOOKED, mixed_precision=policy), 2, 2).layout
    assert repair_layout(layout).of(FSDP2) == (FSDP2(mixed_precision=policy),)
