"""Token models under tensor parallelism and its compositions: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.layouts.parallelisms.tensor_parallel.communication import TensorParallelCalls
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    ActivationSharding,
    AdamW,
    Attention,
    Axis,
    Checkpointing,
    ClipNorm,
    CrossEntropy,
    Data,
    Execution,
    GatedMLP,
    Head,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    Scenario,
    ShardingStrategy,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.strategies import scenarios, trainings
from support.fresh import drawn_afresh
from support.supported import require_mended
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

LAYOUTS = tuple(name for name in layout_names() if TensorParallel.tag in name)
EXAMPLES = max(4, settings().max_examples // 25)
SHARE_OF_COMPOSITIONS = 0.4
"""How many times fewer scenarios a composition has."""
UNHURRIED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
LEAST_PREDICTED = 0.5
"""Of scenarios that are drawn, those whose calls are predicted."""

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=7, padding=1, learned_positions=True),
    length=4,
    layers=(
        Attention(num_heads=4, num_kv_heads=2, rotary=True, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=6, bias=True, norm=Norm.LAYER),
        Layer(width=4, norm=Norm.RMS, residual=True),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)
ROWS = ActivationSharding.ROWS
ON_TWO = (Axis(name="tp", size=2),)
ON_FOUR = (Axis(name="dp", size=2), Axis(name="tp", size=2))


def a_plan(source: Split, head: Split, output: ActivationSharding = ActivationSharding.REPLICATED) -> TensorParallel:
    """Heads, what is between, and a linear layer whole; all of it whole or by positions between layers."""
    entries = (Split.HEADS_OR_HIDDEN, Split.HEADS_OR_HIDDEN, Split.COLWISE)
    plan = tuple(LayerPlan(split=split, output=output) for split in entries)
    return TensorParallel(plan=plan, source=source, source_output=output, head=head)


def a_scenario(parallelism: TensorParallel, *around: Parallelism, tied: bool = False, **execution: Checkpointing) -> Scenario:
    """Two steps of two microbatches of unequal size, of which some labels do not count."""
    head = replace(DECODER.head or Head(), tied=tied)
    training = Training(
        model=replace(DECODER, head=head),
        data=Data(microbatches=(4, 2)),
        loss=CrossEntropy(ignored=IgnoredLabels.SOME),
        optimizer=AdamW(),
        steps=2,
    )
    mesh = Mesh(axes=ON_FOUR if around else ON_TWO)
    layout = Layout(mesh=mesh, parallelisms=(parallelism, *around), execution=Execution(**execution))
    return Scenario(training=training, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_token_models_equal_one_device(layout: str) -> None:
    """Any plan that is drawn leaves what one device leaves, and mostly its calls are predicted, which is then exact."""
    predictions: list[bool] = []

    examples = EXAMPLES if layout == TensorParallel.tag else int(EXAMPLES * SHARE_OF_COMPOSITIONS)

    @drawn_afresh(scenarios(layouts=(layout,), trainings=trainings(tokens=st.just(True))), examples=examples, under=UNHURRIED)
    def equivalent(scenario: Scenario) -> None:
        verdict = check(scenario)
        verdict.assert_no_finding()
        predictions.append(not verdict.unmodelled)

    equivalent()
    if Pipeline.tag not in layout:  # calls of layers inside stages are never predicted
        assert sum(predictions) > LEAST_PREDICTED * len(predictions)


HALVES = [
    (Split.ROWWISE, Split.COLWISE),
    (Split.COLWISE, Split.ROWWISE),
    (Split.REPLICATED, Split.REPLICATED),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("output", [ActivationSharding.REPLICATED, ROWS])
@pytest.mark.parametrize(("source", "head"), HALVES)
def test_a_decoder_is_shared_out_with_calls_predicted_exactly(
    source: Split, head: Split, output: ActivationSharding, tied: bool
) -> None:
    """By tokens or features, with activations whole or by positions between layers, tied or not, computed twice or not."""
    for recompute in (Checkpointing.NONE, Checkpointing.EVERY_LAYER):
        require_predicted(a_scenario(a_plan(source, head, output), tied=tied, checkpointing=recompute))


@pytest.mark.parametrize("source", [Split.ROWWISE, Split.COLWISE])
@pytest.mark.parametrize("redistribute", [False, True])
def test_the_norm_of_an_embedding_is_reduced_where_its_gradient_is_cut(source: Split, redistribute: bool) -> None:
    """That of one by tokens is whole on each rank, unless it is redistributed: calls are as predicted."""
    model = Model(features=2, source=Tokens(vocabulary=2), length=1, layers=(Layer(width=1),))
    plan = TensorParallel(plan=(LayerPlan(),), source=source, redistribute_gradients=redistribute)
    training = Training(model=model, data=Data(microbatches=(1,)), clipping=ClipNorm(max_norm=0.1))
    verdict = check(Scenario(training=training, layout=Layout(mesh=Mesh(axes=ON_TWO), parallelisms=(plan,))))
    require_mended(verdict)
    assert (verdict.outcome, verdict.unmodelled) == (Outcome.EQUIVALENT, "")


@pytest.mark.parametrize("parallelism", [TensorParallel(plan=(LayerPlan(),), source=Split.ROWWISE), SPMD()], ids=["tp", "dp"])
def test_an_embedding_is_trained_whatever_was_trained_before(parallelism: Parallelism, request: pytest.FixtureRequest) -> None:
    """DTensor of torch before 2.11 remembers how many rows the gradient of one has that gives equal results."""
    axis = Axis(name=request.node.callspec.id, size=2)
    layout = Layout(mesh=Mesh(axes=(axis,)), parallelisms=(parallelism,))
    for vocabulary in (4, 5):
        model = Model(features=2, source=Tokens(vocabulary=vocabulary), length=1, layers=(Layer(width=2),))
        training = Training(model=model, data=Data(microbatches=(4,)), loss=Loss.LINEAR_MEAN)
        check(Scenario(training=training, layout=layout)).assert_equivalent()


@pytest.mark.parametrize("wrapping", Wrapping)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_flow_back_into_an_embedding_of_flat_parameters(use_orig_params: bool, wrapping: Wrapping) -> None:
    """An FSDP1 around the whole model makes a view of each parameter, that of the embedding, too: calls are as predicted."""
    model = Model(features=1, source=Tokens(vocabulary=2), length=2, layers=(GatedMLP(hidden=2),), head=Head())
    entry, whole = LayerPlan(split=Split.HEADS_OR_HIDDEN, output=ROWS), Split.REPLICATED
    plan = TensorParallel(plan=(entry,), source=whole, source_output=ROWS, head=whole)
    around = FSDP1(use_orig_params=use_orig_params, wrapping=wrapping)
    layout = Layout(mesh=Mesh(axes=ON_FOUR), parallelisms=(plan, around))
    require_predicted(Scenario(training=Training(model=model, data=Data(microbatches=(2,))), layout=layout))


@pytest.mark.parametrize("vocabulary", [10, 11])
def test_a_head_that_lies_elsewhere_on_some_ranks_rounds_otherwise(vocabulary: int) -> None:
    """Behind an uneven part of the embedding in a flat parameter: ranks then agree in other layers but for rounding."""
    source, loss = Tokens(vocabulary=vocabulary, padding=1), CrossEntropy(ignored=IgnoredLabels.SOME, label_smoothing=0.1)
    layers = (Layer(width=1, bias=False), Attention(head_dim=1, dropout=0.25), GatedMLP(hidden=8, dropout=0.25))
    model = Model(features=1, length=1, source=source, layers=layers, head=Head())
    plan = TensorParallel(plan=(LayerPlan(),) * 3, source=Split.ROWWISE)
    around = FSDP1(strategy=ShardingStrategy.NO_SHARD, use_orig_params=False, wrapping=Wrapping.PER_LAYER)
    mesh = Mesh(axes=(Axis(name="dp", size=4), Axis(name="tp", size=2)))
    for seed in range(4):
        training = Training(model=model, data=Data(microbatches=(12,), batch_dim=1), loss=loss, seed=seed)
        verdict = check(Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, around))))
        assert verdict.outcome is Outcome.EQUIVALENT


def test_gradients_flow_through_a_frozen_embedding_of_a_flat_parameter() -> None:
    """Where the head beside it is trained: frozen layers after it are gathered for backward as well."""
    layers = (Attention(head_dim=1, frozen=True), Layer(width=1))
    model = Model(features=1, source=Tokens(vocabulary=2, frozen=True), length=1, layers=layers, head=Head())
    layout = Layout(mesh=Mesh(axes=ON_FOUR[:1]), parallelisms=(FSDP1(wrapping=Wrapping.PER_LAYER),))
    require_predicted(Scenario(training=Training(model=model, data=Data(microbatches=(2,))), layout=layout))


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(a_scenario(a_plan(Split.ROWWISE, Split.COLWISE), tied=True), id="tied"),
        pytest.param(a_scenario(a_plan(Split.ROWWISE, Split.COLWISE, ROWS)), id="positions"),
        pytest.param(
            a_scenario(a_plan(Split.ROWWISE, Split.COLWISE, ROWS), FSDP2(), tied=True), id="fsdp2", marks=pytest.mark.slow
        ),
        pytest.param(a_scenario(a_plan(Split.COLWISE, Split.ROWWISE), DDP()), id="ddp"),
    ],
)
def test_a_decoder_is_shared_out_among_processes(scenario: Scenario) -> None:
    """Real processes leave the same."""
    assert check(scenario, world="gloo").outcome is Outcome.EQUIVALENT


def test_a_call_that_is_not_predicted_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sum over the tokens of all ranks in the prediction, that sum is one call too many."""
    monkeypatch.setattr(TensorParallelCalls, "_embedding", lambda *_: None)
    scenario = replace(a_scenario(a_plan(Split.ROWWISE, Split.COLWISE)), schedule_seed=11)
    scenario = replace(scenario, training=replace(scenario.training, seed=99, steps=1))
    verdict = check(scenario)
    assert verdict.outcome is Outcome.DIVERGED
    assert "all_reduce.sum over tp in compute" in verdict.reason


def test_a_head_that_is_not_tied_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`parallelize_module` gives the head a weight of its own, whose gradient the embedding's then lacks."""
    monkeypatch.setattr("equivcheck.layouts.parallelisms.tensor_parallel.styles.tie_head_again", lambda _model: None)
    verdict = check(a_scenario(a_plan(Split.ROWWISE, Split.COLWISE), tied=True))
    assert verdict.outcome is not Outcome.EQUIVALENT
