"""Trailing accumulation windows: a last step with fewer microbatches than others."""

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
    CrossEntropy,
    Data,
    Head,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Parallelism,
    Pipeline,
    Replicate,
    Scenario,
    Tokens,
    Training,
)
from support.exported import run_script
from support.supported import require_supported
from support.verdicts import require_predicted

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR = Model(features=2, layers=(Layer(width=3), Layer(width=2)))
DECODER = Model(features=2, length=3, source=Tokens(vocabulary=4), layers=LINEAR.layers, head=Head())


def a_scenario(parallelism: Parallelism, axis: str, *rows: int, loss: Loss | CrossEntropy = Loss.MSE_MEAN) -> Scenario:
    """Three steps on two ranks; the last step has one microbatch less than others."""
    model = DECODER if isinstance(loss, CrossEntropy) else LINEAR
    data = Data(microbatches=rows, last_window=len(rows) - 1)
    return Scenario(
        training=Training(model=model, data=data, optimizer=AdamW(), loss=loss, steps=3),
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=2),)), parallelisms=(parallelism,)),
    )


LAYOUTS = (
    (DDP(no_sync=True), "dp"),
    (Replicate(no_sync=True), "dp"),
    (FSDP1(no_sync=True), "dp"),
    (FSDP2(no_sync=True), "dp"),
    (Pipeline(num_chunks=2), "pp"),
)


@pytest.mark.parametrize("rows", [(4, 4), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("loss", [Loss.MSE_MEAN, CrossEntropy()], ids=repr)
@pytest.mark.parametrize(("parallelism", "axis"), LAYOUTS, ids=repr)
def test_ranks_and_their_script_agree_with_one_device(
    parallelism: Parallelism, axis: str, loss: Loss | CrossEntropy, rows: tuple[int, ...], tmp_path: Path
) -> None:
    """Values agree in the check and in the exported script. Gradients are reduced at the last microbatch of each window."""
    scenario = a_scenario(parallelism, axis, *rows, loss=loss)
    require_supported(scenario)
    if isinstance(parallelism, Pipeline):
        check(scenario).assert_equivalent()
    else:
        require_predicted(scenario)
    run_script(scenario, tmp_path)
