"""Communication that is easily predicted wrong: numbers counted by hand, and a run that agrees."""

from __future__ import annotations

import pytest

from equivcheck import Scenario
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    AuxiliaryLinear,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Parallelism,
    ShardingStrategy,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.worlds.trace.stage import Stage
from support.verdicts import require_predicted

FROZEN_FIRST = Model(features=2, layers=(Layer(width=2, frozen=True), Layer(width=2)))
AUXILIARY = Model(features=2, layers=(Layer(width=2, auxiliary=AuxiliaryLinear.EVEN_STEPS),))
ODD = Model(features=3, layers=(Layer(width=1),))
ZERO2 = ShardingStrategy.SHARD_GRAD_OP

CASES: dict[str, tuple[Model, Parallelism, str, list[tuple[int, int]]]] = {
    # Each layer for forward, the second for backward, and the first ahead of time though nobody differentiates it.
    "fsdp2 gathers ahead in vain": (FROZEN_FIRST, FSDP2(wrapping=Wrapping.PER_LAYER), "all_gather", [(8, 192)] * 2),
    # The first layer once and for all, as FSDP1 takes it for freed; the second for each microbatch.
    "fsdp1 forgets to free": (
        FROZEN_FIRST,
        FSDP1(strategy=ZERO2, wrapping=Wrapping.PER_LAYER, use_orig_params=False),
        "all_gather",
        [(3, 72), (2, 48)],
    ),
    # Three elements and one, each on a boundary of 16 bytes, and then a multiple of the ranks: six in all.
    "fsdp1 aligns": (ODD, FSDP1(use_orig_params=True), "reduce_scatter.sum", [(2, 96)] * 2),
    # The auxiliary linear's gradient is there at even steps only.
    "fsdp2 reduces what has a gradient": (AUXILIARY, FSDP2(), "reduce_scatter.sum", [(2, 160), (2, 96)]),
}


def scenario(model: Model, parallelism: Parallelism, *inner: Parallelism) -> Scenario:
    """Two steps with two microbatches on two data ranks, with one rank along the inner axis."""
    training = Training(model=model, data=Data(microbatches=(4, 4)), steps=2)
    axes = (Axis(name=parallelism.axes[0][0], size=2), *(Axis(name=one.axes[0][0], size=1) for one in inner))
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(*inner, parallelism)))


@pytest.mark.parametrize("case", CASES)
def test_calls_and_bytes_are_those_counted_by_hand(case: str) -> None:
    """Predicted calls and bytes are those counted by hand, and the ranks make the same calls."""
    model, parallelism, op, expected = CASES[case]
    assert_predicted(scenario(model, parallelism), op, expected)


def test_unused_gradients_come_last_in_rebuilt_buckets() -> None:
    """With a cap of 1,048 bytes, rebuilt buckets hold bias and weight first, then norm and auxiliary."""
    model = Model(features=27, layers=(Layer(width=12, norm=Norm.RMS, auxiliary=AuxiliaryLinear.NEVER),))
    rows = TensorParallel(plan=(LayerPlan(split=Split.ROWWISE),))

    plan = scenario(model, DDP(bucket_cap_mb=0.001, static_graph=True), rows)

    # At first all are one bucket, and a map of the four that are used goes before; in the second step two, twice.
    assert_predicted(plan, "all_reduce.sum", [(3, 16 + 2 * 5496), (4, 2 * 5496)])


def assert_predicted(plan: Scenario, op: str, expected: list[tuple[int, int]]) -> None:
    """Check the prediction for the first axis against `expected`, and against a run."""
    found = predict_calls(plan.training, plan.layout).totals
    axes = plan.layout.mesh.names[0]
    assert [found.get((step, Stage.COMPUTE, op, axes), (0, 0)) for step in range(2)] == expected
    require_predicted(plan)
