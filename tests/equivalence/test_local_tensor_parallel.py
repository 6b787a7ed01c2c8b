"""Tensor parallelism on plain tensors: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.layouts.base.limits.repairs import has_shares
from equivcheck.layouts.composition.limits import limit_reason, repair_training
from equivcheck.layouts.parallelisms.local_tensor_parallel import modules
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Activation,
    ActivationSharding,
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
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Scenario,
    Split,
    Tokens,
    Training,
    Wrapping,
)
from support.clipped import clipped_scenario
from support.exported import run_script
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

ROWS, FEATURES = ActivationSharding.ROWS, ActivationSharding.FEATURES
DECODER = Model(
    features=5,
    source=Tokens(vocabulary=5, padding=1, learned_positions=True),
    length=3,
    layers=(
        Attention(num_heads=4, num_kv_heads=4, head_dim=2, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=8, bias=True, norm=Norm.LAYER),
        Layer(width=5, norm=Norm.RMS, residual=True),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)
SPLITS = (Split.HEADS_OR_HIDDEN, Split.HEADS_OR_HIDDEN, Split.COLWISE)
LABELS = CrossEntropy(ignored=IgnoredLabels.SOME, label_smoothing=0.1, class_weights=True, z_loss=0.01)


def a_plan(output: ActivationSharding = ROWS, **options: object) -> LocalTensorParallel:
    """All of the decoder in parts, by positions between layers unless said otherwise."""
    plan = tuple(LayerPlan(split=split, output=output) for split in SPLITS)
    ends = {"source": Split.ROWWISE, "source_output": output, "head": Split.COLWISE}
    return LocalTensorParallel(plan=plan, **(ends | options))  # type: ignore[arg-type]


def a_scenario(
    parallelism: LocalTensorParallel, *around: Parallelism, ranks: int = 2, model: Model = DECODER, **execution: Checkpointing
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped."""
    axes = {**({"dp": 2} if around else {}), "tp": ranks}
    return clipped_scenario(model, axes, parallelism, *around, loss=LABELS, **execution)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("in_parts", [False, True])
def test_uneven_and_empty_parts_equal_one_device(ranks: int, in_parts: bool) -> None:
    """Five tokens, five features and three positions over four ranks: the last has no token, no feature and no position."""
    check(a_scenario(a_plan(loss_parallel=in_parts), ranks=ranks)).assert_equivalent()


@pytest.mark.parametrize("source", [Split.ROWWISE, Split.COLWISE, Split.REPLICATED])
@pytest.mark.parametrize("output", [ActivationSharding.REPLICATED, ROWS])
def test_tied_halves_equal_one_device(source: Split, output: ActivationSharding) -> None:
    """A head uses the part of the embedding that its rank has, and both add to its gradient."""
    head = {Split.ROWWISE: Split.COLWISE, Split.COLWISE: Split.ROWWISE}.get(source, source)
    model = replace(DECODER, head=Head(tied=True, norm=Norm.LAYER))
    check(a_scenario(a_plan(output, source=source, head=head), model=model)).assert_equivalent()


@pytest.mark.parametrize(("heads", "groups", "width", "hidden", "ranks"), [(5, 2, 1, 7, 3), (3, 1, 2, 5, 2), (3, 1, 3, 3, 4)])
def test_uneven_features_within_equal_one_device(heads: int, groups: int, width: int, hidden: int, ranks: int) -> None:
    """Some ranks have a head, or a feature between two linears, more than others, and some none."""
    attention, mlp, last = DECODER.layers
    layers = (replace(attention, num_heads=groups * heads, num_kv_heads=heads, head_dim=width), replace(mlp, hidden=hidden), last)
    parallelism = a_plan()
    if (heads, ranks) == (3, 2):
        reason = limit_reason(*_parts(a_scenario(parallelism, ranks=ranks, model=replace(DECODER, layers=layers))))
        assert "ends within a key and value head" in (reason or "")  # 3 heads of 2 features: torch.chunk makes 3 and 3 of them
        layers = (attention, *layers[1:])
    require_predicted(a_scenario(parallelism, ranks=ranks, model=replace(DECODER, layers=layers)))


def _parts(scenario: Scenario) -> tuple[Training, Layout]:
    return scenario.training, scenario.layout


SHARING = Model(
    features=5,
    layers=(
        Layer(width=5),
        Layer(width=5, shares=0, norm=Norm.RMS),
        Layer(width=5, shares=0, bias=False, frozen=True),
        Layer(width=5),
    ),
)


def a_sharing_scenario(split: Split, output: ActivationSharding, *, frozen: bool = False) -> Scenario:
    """Three layers that have one weight."""
    model = replace(SHARING, layers=(replace(SHARING.layers[0], frozen=frozen), *SHARING.layers[1:]))
    plan = (*(LayerPlan(split=split, output=output),) * 3, LayerPlan(split=Split.ROWWISE))
    case = a_scenario(LocalTensorParallel(plan=plan), model=model)
    return replace(case, training=replace(case.training, loss=Loss.MSE_MEAN, data=Data(microbatches=(5, 3))))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("split", [Split.COLWISE, Split.ROWWISE, Split.REPLICATED])
@pytest.mark.parametrize("output", [ActivationSharding.REPLICATED, ROWS])
def test_layers_that_share_a_weight_equal_one_device(split: Split, output: ActivationSharding, frozen: bool) -> None:
    """Each rank has one part of it, to whose gradient all of them add, a frozen layer too."""
    require_predicted(a_sharing_scenario(split, output, frozen=frozen))


def test_layers_that_share_a_weight_are_cut_alike() -> None:
    """A layer by outputs and one by inputs need other parts of it; the nearest training shares no weight."""
    case = a_sharing_scenario(Split.COLWISE, ActivationSharding.REPLICATED)
    plan = case.layout.of(LocalTensorParallel)[0].plan
    unlike = LocalTensorParallel(plan=(LayerPlan(split=Split.ROWWISE), *plan[1:]))
    layout = replace(case.layout, parallelisms=(unlike,))
    assert "the same shard of the weight" in (limit_reason(case.training, layout) or "")
    assert not has_shares(repair_training(case.training, layout).model)


def test_a_script_shares_weights_again(tmp_path: Path) -> None:
    """Each module that is put in the place of another has a parameter of its own."""
    scenario = a_sharing_scenario(Split.COLWISE, ActivationSharding.REPLICATED)
    run_script(scenario, tmp_path)


def test_weights_that_are_not_shared_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers would train parts of their own."""
    monkeypatch.setattr(modules, "share_weights", lambda *_: None)
    assert check(a_sharing_scenario(Split.COLWISE, ROWS)).outcome.is_finding


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("activation", [Activation.IDENTITY, Activation.RELU])
def test_a_layer_that_trains_a_bias_alone_is_computed_again_for_what_comes_after(activation: Activation, dropout: float) -> None:
    """Its weight is that of a frozen layer: where nothing is kept for backward, backward asks for no input."""
    frozen = Layer(width=2, frozen=True)
    layers = (frozen, frozen, frozen, Layer(width=2, shares=2, activation=activation, dropout=dropout), Layer(width=2))
    plan = (LayerPlan(), LayerPlan(), LayerPlan(split=Split.ROWWISE, output=ROWS), LayerPlan(split=Split.ROWWISE), LayerPlan())
    training = Training(model=Model(features=2, layers=layers), data=Data(microbatches=(2,)))
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="tp", size=2),)),
        parallelisms=(LocalTensorParallel(plan=plan),),
        execution=Execution(checkpointing=Checkpointing.ODD_LAYERS),
    )
    require_predicted(Scenario(training=training, layout=layout))


@pytest.mark.parametrize("output", ActivationSharding)
def test_a_bias_that_is_added_to_sums_asks_for_no_gradient_of_partial_sums(output: ActivationSharding) -> None:
    """Only the bias is trained, because the weight is a frozen layer's. Backward does not gather the output's gradient."""
    layers = (Layer(width=4, frozen=True), Layer(width=4, shares=0), Layer(width=4))
    plan = (LayerPlan(split=Split.ROWWISE), LayerPlan(split=Split.ROWWISE, output=output), LayerPlan(split=Split.ROWWISE))
    training = Training(model=Model(features=4, layers=layers), data=Data(microbatches=(4,)))
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(LocalTensorParallel(plan=plan),))
    require_predicted(Scenario(training=training, layout=layout))


@pytest.mark.parametrize("around", [DDP(no_sync=True), FSDP2(wrapping=Wrapping.PER_LAYER)], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.EVERY_LAYER])
def test_data_parallelism_around_it(around: Parallelism, checkpointing: Checkpointing) -> None:
    """Its parameters are plain tensors, which others average or shard; calls come again where layers are recomputed."""
    require_predicted(a_scenario(a_plan(loss_parallel=True), around, checkpointing=checkpointing))


def test_flat_parameters_are_not_clipped_by_norm() -> None:
    """Parts and what each rank has whole lie in one of them: the limit is ours, and holds beyond those of torch as well."""
    verdict = check(a_scenario(a_plan(), FSDP1()), beyond=True)
    assert verdict.outcome is Outcome.UNSUPPORTED
    assert "norms cannot be told apart" in verdict.reason


@pytest.mark.parametrize("wrapping", Wrapping)
@pytest.mark.parametrize("frozen", ["embedding", "norm and attention"])
def test_gradients_of_frozen_views_of_a_flat_parameter_are_communicated(wrapping: Wrapping, frozen: str) -> None:
    """Autograd computes them where others of the same FSDP1 unit are trained: calls are as predicted."""
    attention, *others = DECODER.layers
    model = {
        "embedding": replace(DECODER, source=replace(DECODER.source, frozen=True)),
        "norm and attention": replace(DECODER, layers=(replace(attention, frozen=True), *others)),
    }[frozen]
    around = FSDP1(wrapping=wrapping)
    case = a_scenario(a_plan(), around, model=model)
    require_predicted(replace(case, training=replace(case.training, clipping=None)))


SIZES = st.integers(min_value=1, max_value=5)


@given(data=st.data(), widths=st.lists(SIZES, min_size=2, max_size=4), rows=SIZES, ranks=st.integers(min_value=2, max_value=4))
@settings(max_examples=40, deadline=None)
def test_every_way_through_linear_layers(data: st.DataObject, widths: list[int], rows: int, ranks: int) -> None:
    """Whatever lies between two linears, the move there is right, and so is that of its gradient."""
    layers = tuple(Layer(width=width, norm=data.draw(st.sampled_from((None, *Norm)))) for width in widths[1:])
    ways = st.builds(LayerPlan, split=st.sampled_from((Split.COLWISE, Split.ROWWISE)), output=st.sampled_from(ActivationSharding))
    plan = [data.draw(ways) for _ in layers[:-1]] + [LayerPlan(split=data.draw(st.sampled_from((Split.COLWISE, Split.ROWWISE))))]
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=ranks),)), parallelisms=(LocalTensorParallel(plan=tuple(plan)),))
    training = Training(
        model=Model(features=widths[0], layers=layers), data=Data(microbatches=(rows,)), clipping=ClipNorm(norm_type=NormType.INF)
    )
    verdict = check(Scenario(training=training, layout=layout))
    assume(verdict.outcome is not Outcome.UNSUPPORTED)  # a norm of features in parts
    verdict.assert_no_finding()


MISTAKES = {
    "copies nothing to columns": (AxisRanks, "move", lambda ranks, values, _route: values),
    "uses norms of its own rows alone": (AxisRanks, "copy_to_region", lambda _ranks, parameter: parameter),
    "adds a bias to each addend": (
        modules.LocalLinear,
        "bias_of_output",
        lambda module, bias: bias * module.ranks.size if module.leave.target.value == "replicated" else bias,
    ),
    "looks all tokens up": (modules.LocalEmbedding, "own_tokens", lambda module, tokens, _start: module.weight[tokens % 4]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong is a finding."""
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    head = Split.ROWWISE if mistake.startswith("adds") else Split.COLWISE
    assert check(a_scenario(a_plan(head=head))).outcome.is_finding
