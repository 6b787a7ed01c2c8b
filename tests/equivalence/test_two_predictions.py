"""Heads that predict two tokens: both predictions' labels, weights and counts reach the rank with the position."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    AdamW,
    Axis,
    ContextParallel,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Normaliser,
    Parallelism,
    Pipeline,
    Replicate,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from support.exported import run_script
from support.supported import require_supported

pytestmark = pytest.mark.filterwarnings("ignore")

PLAN = (LayerPlan(), LayerPlan())
MODEL = Model(
    features=4,
    length=4,
    source=Tokens(vocabulary=4),
    layers=(Layer(width=4), Layer(width=4)),
    head=Head(predicts_two=True, norm=Norm.RMS, bias=True),
    offset=True,
)
LOSS = CrossEntropy(ignored=IgnoredLabels.SOME, z_loss=0.01)


def a_scenario(parallelism: Parallelism, axis: str, model: Model = MODEL, loss: CrossEntropy = LOSS) -> Scenario:
    """Two steps on two ranks."""
    training = Training(model=model, data=Data(microbatches=(4, 2)), loss=loss, optimizer=AdamW(), steps=2)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=2),)), parallelisms=(parallelism,)))


LAYOUTS = (
    (DDP(), "dp"),
    (Replicate(), "dp"),
    (FSDP1(), "dp"),
    (FSDP2(), "dp"),
    (ContextParallel(), "cp"),
    (Pipeline(num_chunks=2), "pp"),
    (TensorParallel(plan=PLAN, head=Split.REPLICATED), "tp"),
)


@pytest.mark.parametrize(("parallelism", "axis"), LAYOUTS, ids=repr)
def test_ranks_and_their_script_agree_with_one_device(parallelism: Parallelism, axis: str, tmp_path: Path) -> None:
    """Values agree in the check and in the exported script."""
    scenario = a_scenario(parallelism, axis)
    require_supported(scenario)
    check(scenario).assert_equivalent()
    run_script(scenario, tmp_path)


OTHERS = (
    (Pipeline(num_chunks=2, static_shapes=True), "pp"),
    (FSDP2(wrapping=Wrapping.PER_LAYER, head_unit=True, loss_chunks=2), "dp"),
    (LocalTensorParallel(plan=PLAN, head=Split.REPLICATED), "tp"),
)


@pytest.mark.parametrize(("parallelism", "axis"), OTHERS, ids=repr)
def test_ranks_agree_with_one_device(parallelism: Parallelism, axis: str) -> None:
    """Stages know their output's shape, and chunks of the loss have both predictions."""
    scenario = a_scenario(parallelism, axis)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_predictions_may_be_averaged_over_sequences_and_documents() -> None:
    """Weights of sequences and rows multiply those of the predictions."""
    model = Model(features=2, length=5, document_length=2, source=Tokens(vocabulary=4), layers=MODEL.layers[:1], head=MODEL.head)
    loss = CrossEntropy(per=Normaliser.SEQUENCE, row_weights=True, ignored=IgnoredLabels.SOME)
    check(a_scenario(ContextParallel(), "cp", model, loss)).assert_equivalent()
