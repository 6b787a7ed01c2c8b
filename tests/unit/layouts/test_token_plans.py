"""Limits of tensor parallelism for token models, and their repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import InvalidScenario
from equivcheck.layouts.composition.limits import limit_reason, repair_training
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    ActivationSharding,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from equivcheck.strategies import trainings

HEADS_OR_HIDDEN, ROWS = LayerPlan(split=Split.HEADS_OR_HIDDEN), ActivationSharding.ROWS
DECODER = Model(
    features=4,
    source=Tokens(vocabulary=8),
    length=2,
    layers=(Attention(num_heads=4, num_kv_heads=2), GatedMLP(hidden=4)),
    head=Head(),
)
BY_ALL = TensorParallel(plan=(HEADS_OR_HIDDEN, HEADS_OR_HIDDEN), source=Split.ROWWISE, head=Split.COLWISE)
BY_POSITIONS = replace(BY_ALL, plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN, output=ROWS),) * 2, source_output=ROWS)
LAYERS_ALONE = TensorParallel(plan=(HEADS_OR_HIDDEN, HEADS_OR_HIDDEN))


def a_training(model: Model) -> Training:
    """A training on two sequences."""
    return Training(model=model, data=Data(microbatches=(2,)), loss=CrossEntropy())


def over(tp: int, parallelism: TensorParallel, *around: Parallelism) -> Layout:
    """Layout with a number of tensor-parallel ranks and one data rank around them."""
    axes = (Axis(name="dp", size=1),) * bool(around) + (Axis(name="tp", size=tp),)
    return Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism, *around))


def with_layers(*layers: Attention | GatedMLP | Layer) -> Model:
    """The decoder with other layers."""
    return replace(DECODER, layers=layers)


def test_a_decoder_is_shared_out_whole() -> None:
    """A decoder runs with heads, hidden features, tokens and positions sharded."""
    for parallelism in (BY_ALL, BY_POSITIONS):
        assert limit_reason(a_training(DECODER), over(2, parallelism)) is None


LIMITS = [
    (with_layers(Attention(num_heads=2, num_kv_heads=1), GatedMLP(hidden=4)), over(2, BY_ALL), "key and value heads"),
    (with_layers(Attention(num_heads=2, num_kv_heads=2), GatedMLP(hidden=3)), over(2, BY_ALL), "pytorch#150336"),
    (with_layers(Attention(num_heads=8, num_kv_heads=8), GatedMLP(hidden=31)), over(7, LAYERS_ALONE), "a multiple of the ranks"),
    (with_layers(Attention(), Layer(width=4)), over(1, BY_ALL), "split that the kind of layer does not have"),
    (
        DECODER,
        over(2, TensorParallel(plan=(LayerPlan(split=Split.COLWISE), HEADS_OR_HIDDEN))),
        "split that the kind of layer does not have",
    ),
    (
        replace(DECODER, source=Tokens(vocabulary=5)),
        over(4, replace(BY_ALL, plan=(LayerPlan(),) * 2)),
        "that rank cannot look anything up",
    ),
    (replace(DECODER, head=Head(tied=True)), over(2, replace(BY_ALL, head=Split.ROWWISE)), "tied to the embedding"),
    (replace(DECODER, head=Head(tied=True)), over(2, BY_ALL, DDP()), "no longer share it"),
    (replace(DECODER, head=Head(tied=True)), over(2, BY_ALL, FSDP1(use_orig_params=False)), "no longer share it"),
    (replace(DECODER, length=3), over(2, BY_POSITIONS), "positions of sequences"),
    (
        replace(DECODER, features=1),
        over(2, TensorParallel(plan=(HEADS_OR_HIDDEN, HEADS_OR_HIDDEN), source=Split.COLWISE)),
        "as one dim",
    ),
    (
        replace(DECODER, head=None),
        over(2, replace(BY_ALL, plan=(HEADS_OR_HIDDEN, LayerPlan(output=ROWS)))),
        "not supported without a head",
    ),
]


@pytest.mark.parametrize(("model", "layout", "words"), LIMITS)
def test_what_cannot_run_says_why_and_what_can(model: Model, layout: Layout, words: str) -> None:
    """The reason names the feature, and the repaired training runs."""
    training = a_training(model)
    reason = limit_reason(training, layout)
    assert reason is not None
    assert words in reason
    assert limit_reason(repair_training(training, layout), layout) is None


def test_ties_last_where_dtensors_are_trained() -> None:
    """With FSDP2 outside, embedding and head stay tied, because one DTensor serves both."""
    assert limit_reason(a_training(replace(DECODER, head=Head(tied=True))), over(2, BY_ALL, FSDP2())) is None


@given(trainings(tokens=st.just(True)), st.integers(1, 8), st.sampled_from(Split), st.data())
def test_every_token_model_can_be_brought_to_every_plan(training: Training, tp: int, split: Split, data: st.DataObject) -> None:
    """Repairs end for any layers and any plan."""
    outputs = st.sampled_from([ActivationSharding.REPLICATED, ROWS])
    entries = [LayerPlan(split=split, output=data.draw(outputs)) for _ in training.model.layers if split is not Split.NOT_IN_PLAN]
    entries = entries or [LayerPlan(split=Split.NOT_IN_PLAN)] * len(training.model.layers)
    splits = st.sampled_from([each for each in Split if each is not Split.HEADS_OR_HIDDEN])
    try:
        parallelism = TensorParallel(
            plan=tuple(entries), source=data.draw(splits), source_output=data.draw(outputs), head=data.draw(splits)
        )
    except InvalidScenario:
        return
    layout = over(tp, parallelism)
    assert limit_reason(repair_training(training, layout), layout) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": Split.HEADS_OR_HIDDEN}, "a Split other than HEADS_OR_HIDDEN"),
        ({"head": Split.HEADS_OR_HIDDEN}, "a Split other than HEADS_OR_HIDDEN"),
        ({"source_output": ROWS}, "if the source or the first layer is Split.NOT_IN_PLAN"),
        ({"source": Split.ROWWISE, "source_output": ActivationSharding.FEATURES}, "or ROWS"),
        ({"plan": (LayerPlan(output=ROWS),)}, "ROWS if a head in the plan follows"),
    ],
)
def test_what_no_model_has_is_refused(fields: dict[str, object], words: str) -> None:
    """The error states the allowed values."""
    with pytest.raises(InvalidScenario, match=words):
        TensorParallel(**fields)  # type: ignore[arg-type]
