"""The auxiliary loss of experts: a mean over rows, by choices that ranks count together; `test_experts` draws it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.oracle.reference.summation import split_traces
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    SPMD,
    Attention,
    AttentionExchange,
    Axis,
    Checkpointing,
    ContextParallel,
    CrossEntropy,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    Head,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    Scenario,
    ScoreFunction,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.training.loop import single_device_setup, train
from equivcheck.worlds.trace.stage import Stage
from support.exported import run_script
from support.supported import require_supported
from support.verdicts import require_predicted

EXPERTS = Experts(hidden=3, num_experts=4, top_k=2, scores=ScoreFunction.SIGMOID, norm=Norm.RMS, balance=0.5)
OTHERS = Experts(hidden=2, num_experts=3, balance=1.0)


def a_scenario(*parallelisms: Parallelism, loss: Loss | CrossEntropy | None = None, **axes: int) -> Scenario:
    """Two steps of two microbatches of unequal size."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=3, layers=(EXPERTS, Attention(), OTHERS), head=Head())
    training = Training(
        model=model, data=Data(microbatches=(4, 8)), loss=loss or CrossEntropy(), optimizer=SGD(lr=1e-3, momentum=0.9), steps=2
    )
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=parallelisms))


CALLS = {
    "ddp": (1, a_scenario(DDP(), dp=2)),
    "replicas of shards": (2, a_scenario(FSDP2(wrapping=Wrapping.PER_LAYER), dp_replicate=2, dp_shard=2)),
    "one rank": (0, a_scenario(DDP(), dp=1)),
    "over experts": (2, a_scenario(ExpertParallel(), DDP(), dp=2, ep=2)),
    "over positions": (2, a_scenario(ContextParallel(exchange=AttentionExchange.GATHER), DDP(), dp=2, cp=2)),
}
"""Along how many axes a layer sums its counts in each microbatch, and the layout."""


def _sums(scenario: Scenario) -> Counter[int]:
    """How often the first rank sums something over others while it computes, by step; of calls all of which are predicted."""
    verdict = require_predicted(scenario)
    calls = (call for call in verdict.calls[0] if call.op == "all_reduce.sum" and call.stage is Stage.COMPUTE)
    return Counter(call.step for call in calls)


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.EVERY_LAYER])
def test_choices_are_counted_once_for_each_layer_and_microbatch(case: str, checkpointing: Checkpointing) -> None:
    """Along every axis of several ranks with other rows or positions; not again where a layer is computed again."""
    num_axes, scenario = CALLS[case]
    scenario = replace(scenario, layout=replace(scenario.layout, execution=Execution(checkpointing=checkpointing)))
    layers = tuple(layer.with_fields(balance=0.0) for layer in scenario.training.model.layers)
    without = replace(scenario, training=replace(scenario.training, model=replace(scenario.training.model, layers=layers)))
    counted = Counter(dict.fromkeys((0, 1), 2 * 2 * num_axes))
    assert _sums(scenario) - _sums(without) == +counted


@pytest.mark.parametrize("loss", [CrossEntropy(), Loss.LINEAR_MEAN, Loss.MSE_SUM])
def test_one_device_computes_the_same_in_parts(loss: Loss | CrossEntropy) -> None:
    """Parts of a microbatch go by the choices of all of it: what confirms a divergence knows of no other loss."""
    training = a_scenario(DDP(), dp=2, loss=loss).training
    whole = train(single_device_setup(training))
    for parts in split_traces(training, 4):
        for one, other in zip(whole.steps, parts.steps, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-12)
            np.testing.assert_allclose(other.gradients.values, one.gradients.values, rtol=1e-9, atol=1e-12)


@given(st.sampled_from(ScoreFunction), st.integers(1, 2), st.integers(1, 4))
@settings(max_examples=10)
def test_it_counts_as_a_mean_over_rows(scores: ScoreFunction, top_k: int, microbatches: int) -> None:
    """Of a router that scores all alike it is the coefficient, however many microbatches of whatever size there are."""
    layer = Experts(hidden=1, num_experts=4, top_k=top_k, scores=scores, balance=0.25)
    model = Model(features=2, layers=(layer,))
    data = Data(microbatches=tuple(range(1, microbatches + 1)))
    losses = []
    for balance in (0.25, 0.0):
        setup = single_device_setup(
            Training(model=replace(model, layers=(layer.with_fields(balance=balance),)), data=data, optimizer=SGD())
        )
        setup.model.get_parameter("layers.0.router.weight").data.zero_()
        losses.append(train(setup).steps[0].loss)
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[0] - losses[1] == pytest.approx(0.25)


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_the_stages_of_a_pipeline_have_one_for_each_sequence() -> None:
    """The limit says why a microbatch has none, and the repair keeps a loss that chunks do not change."""
    scenario = a_scenario(Pipeline(num_chunks=2), pp=2)
    assert "backward of the first chunk" in (why_unsupported(scenario) or "")
    training = repair_training(scenario.training, scenario.layout)
    assert [layer.balance_per_sequence for layer in training.model.layers] == [True, False, True]
    assert [layer.balance for layer in training.model.layers] == [0.5, 0.0, 1.0]
    assert why_unsupported(replace(scenario, training=training)) is None


SCRIPTS = {
    "ddp": a_scenario(DDP(), dp=2),
    "replicas of shards": a_scenario(FSDP2(), dp_replicate=2, dp_shard=2),
    "spmd": a_scenario(SPMD(), dp=2, loss=Loss.LINEAR_SUM),
    "over experts": a_scenario(ExpertParallel(), DDP(), dp=2, ep=2),
    "over positions": a_scenario(ContextParallel(), cp=2, loss=Loss.MSE_SUM),
}


WRITTEN_IN_EACH_RUN = ("over positions",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in WRITTEN_IN_EACH_RUN else pytest.mark.slow) for case in SCRIPTS]
)
def test_a_script_counts_as_ranks_do(case: str, tmp_path: Path) -> None:
    """It trains the same on several ranks as on one device, and exits with 0."""
    scenario = SCRIPTS[case]
    require_supported(scenario)
    scenario = replace(scenario, training=repair_training(scenario.training, scenario.layout))
    assert scenario.training.model.balances
    _, printed = run_script(scenario, tmp_path, numbers=None)
    assert max(printed.values()) < 1e-9
