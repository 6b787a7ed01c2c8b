"""`fully_shard` with another sharded dim for each parameter."""

from __future__ import annotations

import pytest

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, repair_training
from equivcheck.scenario import (
    FSDP2,
    Axis,
    Data,
    ExpertParallel,
    GatedMLP,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario.layers.experts import Experts
from equivcheck.scenario.mesh import DP, EP, TP
from equivcheck.training.layers.parameters import parameters_of
from support.verdicts import require_predicted

LARGEST = FSDP2(shard_largest_dim=True)
WIDE_AND_TALL = Model(features=4, layers=(Layer(width=8, norm=Norm.LAYER), Layer(width=4), Layer(width=4)))
"""Weights of shapes (8, 4), (4, 8) and (4, 4)."""


def scenario(model: Model, *parallelisms: Parallelism, sizes: tuple[int, ...]) -> Scenario:
    """Two microbatches and two steps on the axes of the parallelisms, outermost first."""
    names = [name for each in reversed(parallelisms) for name in each.axes[len(sizes) - len(parallelisms)]]
    if len(parallelisms) > 1:
        names = [DP, TP]
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    training = Training(model=model, data=Data(microbatches=(8, 8)), steps=2)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


def test_each_parameter_is_sharded_along_the_first_of_its_largest_dims() -> None:
    """Vectors have one dim."""
    dims = {parameter.shape: LARGEST.shard_dim(parameter) for parameter in parameters_of(WIDE_AND_TALL)}
    assert dims == {(8, 4): 0, (4, 8): 1, (4, 4): 0, (8,): 0, (4,): 0}


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1,)], ids=str)
@pytest.mark.parametrize("wrapping", list(Wrapping))
def test_parameters_sharded_along_their_largest_dim_train_like_one_device(sizes: tuple[int, ...], wrapping: Wrapping) -> None:
    """One unit has parameters sharded along dim 0 and along dim 1."""
    require_predicted(scenario(WIDE_AND_TALL, FSDP2(shard_largest_dim=True, wrapping=wrapping), sizes=sizes))


@pytest.mark.parametrize("split", [Split.COLWISE, Split.ROWWISE])
def test_the_largest_dim_of_a_dtensor_is_that_of_the_full_parameter(split: Split) -> None:
    """Tensor parallelism halves one dim of each weight; the largest dim stays the same."""
    model = Model(features=4, layers=(Layer(width=8), Layer(width=4)))
    plan = TensorParallel(plan=(LayerPlan(split=split), LayerPlan()))
    require_predicted(scenario(model, plan, LARGEST, sizes=(2, 2)))


def test_a_largest_dim_other_than_the_first_must_be_even() -> None:
    """The nearest training has widths that are multiples of the ranks; an uneven first dim is allowed."""
    training = scenario(Model(features=5, layers=(Layer(width=3),)), LARGEST, sizes=(2,))
    assert check(training).outcome is Outcome.UNSUPPORTED
    repaired = repair_training(training.training, training.layout)
    require_predicted(Scenario(training=repaired, layout=training.layout))
    require_predicted(scenario(Model(features=3, layers=(Layer(width=5),)), LARGEST, sizes=(2,)))


@pytest.mark.parametrize(
    ("inner", "axis"), [(LocalTensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),)), TP), (ExpertParallel(), EP)]
)
def test_plain_shards_are_not_sharded_along_their_largest_dim(inner: Parallelism, axis: str) -> None:
    """The function would see a shard. The nearest layout shards the last dim."""
    mesh = Mesh(axes=(Axis(name=DP, size=2), Axis(name=axis, size=2)))
    layout = Layout(mesh=mesh, parallelisms=(inner, LARGEST))
    layer = GatedMLP(hidden=4) if axis == TP else Experts(num_experts=2, hidden=4)
    training = Training(model=Model(features=4, length=2, layers=(layer,)), data=Data(microbatches=(4,)))
    assert "largest dim depends on the rank" in (limit_reason(training, layout) or "")
    assert repair_layout(layout).of(FSDP2) == (FSDP2(shard_last_dim=True),)
