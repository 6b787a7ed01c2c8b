"""Means over sequences and weighted rows: weights reach the rank with the label."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.scenario import (
    DDP,
    FSDP2,
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
    Normaliser,
    Parallelism,
    Pipeline,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from support.exported import run_script
from support.supported import require_supported

pytestmark = pytest.mark.filterwarnings("ignore")

PLAN = (LayerPlan(), LayerPlan())
MODEL = Model(features=2, length=4, source=Tokens(vocabulary=4), layers=(Layer(width=2), Layer(width=2)), head=Head())
LOSS = CrossEntropy(per=Normaliser.SEQUENCE, row_weights=True, ignored=IgnoredLabels.SOME, z_loss=0.01)


def a_scenario(parallelism: Parallelism, axis: str) -> Scenario:
    """Two steps on two ranks."""
    return Scenario(
        training=Training(model=MODEL, data=Data(microbatches=(4, 4)), loss=LOSS, steps=2),
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=2),)), parallelisms=(parallelism,)),
    )


WRITTEN = (
    (DDP(), "dp"),
    (FSDP2(), "dp"),
    (ContextParallel(), "cp"),
    (Pipeline(num_chunks=2), "pp"),
    (TensorParallel(plan=PLAN, head=Split.COLWISE), "tp"),
)


@pytest.mark.parametrize(("parallelism", "axis"), WRITTEN, ids=repr)
def test_ranks_and_their_script_agree_with_one_device(parallelism: Parallelism, axis: str, tmp_path: Path) -> None:
    """Values agree in the check and in the exported script."""
    scenario = a_scenario(parallelism, axis)
    require_supported(scenario)
    check(scenario).assert_equivalent()
    run_script(scenario, tmp_path)


def test_a_vocabulary_parallel_loss_uses_the_weights() -> None:
    """Local tensor parallelism computes the weighted loss from its own classes."""
    scenario = a_scenario(LocalTensorParallel(plan=PLAN, head=Split.COLWISE, loss_parallel=True), "tp")
    require_supported(scenario)
    check(scenario).assert_equivalent()
