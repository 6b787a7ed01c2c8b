"""Tensor parallelism on plain tensors: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.parallelisms.local_tensor_parallel import modules
from equivcheck.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    ActivationSharding,
    AdamW,
    Attention,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    Execution,
    GatedMLP,
    Head,
    Ignored,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Recompute,
    Scenario,
    Split,
    Tokens,
    Training,
    Wrapping,
)

pytestmark = pytest.mark.mostly_equivalent

ROWS, FEATURES = ActivationSharding.ROWS, ActivationSharding.FEATURES
DECODER = Model(
    features=5,
    source=Tokens(vocabulary=5, padding=1, learned_positions=True),
    length=3,
    layers=(
        Attention(heads=4, kv_heads=4, head_width=2, bias=True, norm=Norm.RMS, dropout=0.25),
        GatedMLP(hidden=8, bias=True, norm=Norm.LAYER),
        Layer(width=5, norm=Norm.RMS, residual=True),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)
SPLITS = (Split.WITHIN, Split.WITHIN, Split.COLUMN)
LABELS = CrossEntropy(ignored=Ignored.SOME, label_smoothing=0.1, class_weights=True, z_loss=0.01)


def a_plan(output: ActivationSharding = ROWS, **options: object) -> LocalTensorParallel:
    """All of the decoder in parts, by positions between layers unless said otherwise."""
    plan = tuple(LayerPlan(split=split, output=output) for split in SPLITS)
    ends = {"source": Split.ROW, "source_output": output, "head": Split.COLUMN}
    return LocalTensorParallel(plan=plan, **(ends | options))  # type: ignore[arg-type]


def a_scenario(
    parallelism: LocalTensorParallel, *around: Parallelism, ranks: int = 2, model: Model = DECODER, **execution: Recompute
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped."""
    training = Training(
        model=model, data=Data(microbatches=(4, 2)), loss=LABELS, optimizer=AdamW(), clipping=ClipNorm(max_norm=0.05), steps=2
    )
    axes = (*(Axis(name="dp", size=2),) * len(around), Axis(name="tp", size=ranks))
    layout = Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism, *around), execution=Execution(**execution))
    return Scenario(training=training, layout=layout)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("in_parts", [False, True])
def test_uneven_and_empty_parts_equal_one_device(ranks: int, in_parts: bool) -> None:
    """Five tokens, five features and three positions over four ranks: the last has no token, no feature and no position."""
    check(a_scenario(a_plan(loss_parallel=in_parts), ranks=ranks)).assert_equivalent()


@pytest.mark.parametrize("source", [Split.ROW, Split.COLUMN, Split.REPLICATED])
@pytest.mark.parametrize("output", [ActivationSharding.WHOLE, ROWS])
def test_tied_halves_equal_one_device(source: Split, output: ActivationSharding) -> None:
    """A head uses the part of the embedding that its rank has, and both add to its gradient."""
    head = {Split.ROW: Split.COLUMN, Split.COLUMN: Split.ROW}.get(source, source)
    model = replace(DECODER, head=Head(tied=True, norm=Norm.LAYER))
    check(a_scenario(a_plan(output, source=source, head=head), model=model)).assert_equivalent()


@pytest.mark.parametrize("around", [DDP(no_sync=True), FSDP2(wrapping=Wrapping.PER_LAYER)], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("checkpointing", [Recompute.NONE, Recompute.EVERY_LAYER])
def test_data_parallelism_around_it(around: Parallelism, checkpointing: Recompute) -> None:
    """Its parameters are plain tensors, which others average or shard; calls come again where layers are recomputed."""
    verdict = check(a_scenario(a_plan(loss_parallel=True), around, checkpointing=checkpointing))
    verdict.assert_equivalent()
    assert not verdict.unmodelled


def test_flat_parameters_are_not_clipped_by_norm() -> None:
    """Parts and what each rank has whole lie in one of them: the limit is ours, and holds beyond those of torch as well."""
    verdict = check(a_scenario(a_plan(), FSDP1()), beyond=True)
    assert verdict.outcome is Outcome.UNSUPPORTED
    assert "whose norms are not told apart" in verdict.reason


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
    verdict = check(replace(case, training=replace(case.training, clipping=None)))
    assert (verdict.outcome, verdict.unmodelled) == (Outcome.EQUIVALENT, "")


SIZES = st.integers(min_value=1, max_value=5)


@given(data=st.data(), widths=st.lists(SIZES, min_size=2, max_size=4), rows=SIZES, ranks=st.integers(min_value=2, max_value=4))
@settings(max_examples=40, deadline=None)
def test_every_way_through_linear_layers(data: st.DataObject, widths: list[int], rows: int, ranks: int) -> None:
    """Whatever lies between two linears, the move there is right, and so is that of its gradient."""
    layers = tuple(Layer(width=width, norm=data.draw(st.sampled_from((None, *Norm)))) for width in widths[1:])
    ways = st.builds(LayerPlan, split=st.sampled_from((Split.COLUMN, Split.ROW)), output=st.sampled_from(ActivationSharding))
    plan = [data.draw(ways) for _ in layers[:-1]] + [LayerPlan(split=data.draw(st.sampled_from((Split.COLUMN, Split.ROW))))]
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=ranks),)), parallelisms=(LocalTensorParallel(plan=tuple(plan)),))
    training = Training(
        model=Model(features=widths[0], layers=layers), data=Data(microbatches=(rows,)), clipping=ClipNorm(norm_type=NormType.INF)
    )
    verdict = check(Scenario(training=training, layout=layout))
    assume(verdict.outcome is not Outcome.UNSUPPORTED)  # a norm of features in parts
    verdict.assert_no_finding()


MISTAKES = {
    "copies nothing to columns": (AxisRanks, "move", lambda ranks, values, _route: values),
    "uses norms of its own rows alone": (AxisRanks, "used_by_all", lambda _ranks, parameter: parameter),
    "adds a bias to each addend": (
        modules.LocalLinear,
        "bias_of_output",
        lambda module, bias: bias * module.ranks.size if module.leave.target.value == "whole" else bias,
    ),
    "looks all tokens up": (modules.LocalEmbedding, "own_tokens", lambda module, tokens, _start: module.weight[tokens % 4]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong is a finding."""
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    head = Split.ROW if mistake.startswith("adds") else Split.COLUMN
    assert check(a_scenario(a_plan(head=head))).outcome.is_finding
