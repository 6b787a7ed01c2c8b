"""Pipelines whose ranks split microbatches into chunks themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equivcheck import check
from equivcheck.layouts.base.data_rows import with_equal_chunks
from equivcheck.layouts.composition.limits import limit_reason, repair_training
from equivcheck.scenario import (
    ActivationSharding,
    Experts,
    Layer,
    LayerPlan,
    LocalDataParallel,
    LocalTensorParallel,
    Loss,
    Model,
    Parallelism,
    Pipeline,
    Scenario,
    Split,
)
from equivcheck.training.material import Batch
from support.clipped import clipped_scenario
from support.exported import run_script
from support.staged import DECODER, PIPELINES
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent

UNEVEN = (10, 6)
"""Rows that two data-parallel ranks split into two chunks of three and two rows, and of two rows and one."""
ROWS = Model(
    features=4,
    layers=(Layer(width=4, dropout=0.5), Layer(width=4), Layer(width=4, dropout=0.25), Layer(width=4)),
)


def a_scenario(
    name: str, *around: Parallelism, rows: tuple[int, ...] = UNEVEN, model: Model = DECODER, **options: object
) -> Scenario:
    """Two clipped steps of microbatches that ranks split themselves."""
    pipeline = replace(PIPELINES[name], presplit=True, **options)  # type: ignore[arg-type]
    loss = {} if model.head is not None else {"loss": Loss.MSE_MEAN}
    return clipped_scenario(model, {**({"dp": 2} if around else {}), "pp": 2}, pipeline, *around, microbatches=rows, **loss)


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("model", [DECODER, ROWS], ids=["labels", "rows"])
@pytest.mark.parametrize("name", PIPELINES)
def test_chunks_of_unlike_size_equal_one_device(name: str, model: Model, static_shapes: bool) -> None:
    """Each chunk counts by its rows or labels, and its padding does not count."""
    scenario = a_scenario(name, LocalDataParallel(), model=model, static_shapes=static_shapes)
    require_supported(scenario)
    check(scenario).assert_equivalent()


@pytest.mark.parametrize("rows", [(5,), (4,)])
def test_scaled_gradients_of_chunks_equal_one_device(rows: tuple[int, ...]) -> None:
    """Torch divides gradients by the number of chunks, whatever their numbers of rows."""
    scenario = a_scenario("gpipe", rows=rows, model=ROWS, scale_grads=True)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_padded_rows_are_sharded_over_ranks() -> None:
    """Sequence parallelism shards the rows and the dropout masks of each padded chunk."""
    plan = LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS)
    sharded = LocalTensorParallel(plan=(plan, plan, plan, replace(plan, output=ActivationSharding.REPLICATED)))
    pipeline = Pipeline(num_chunks=2, presplit=True)
    scenario = clipped_scenario(ROWS, {"pp": 2, "tp": 2}, sharded, pipeline, microbatches=(7, 4), loss=Loss.MSE_MEAN)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_processes_compute_the_same() -> None:
    """Gloo sends padded chunks, too."""
    scenario = a_scenario("zbv", rows=(5, 3))
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


@pytest.mark.parametrize(
    ("name", "rows", "model"), [("gpipe", (5, 3), ROWS), ("zbv", (5,), DECODER), ("interleaved", (4, 4), DECODER)]
)
def test_a_script_computes_what_ranks_compute(name: str, rows: tuple[int, ...], model: Model, tmp_path: Path) -> None:
    """A script splits and pads chunks like the ranks of a check."""
    scenario = a_scenario(name, rows=rows, model=model)
    require_supported(scenario)
    script, _ = run_script(scenario, tmp_path)
    assert ("pad_chunks(inputs)" in script) is any(count % 2 for count in rows)


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_a_chunk_needs_a_row() -> None:
    """A microbatch with fewer rows than chunks is refused, and repaired without changing larger microbatches."""
    scenario = a_scenario("gpipe", LocalDataParallel(), rows=(2, 6))
    assert "a chunk without rows has no mean" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_training(scenario.training, scenario.layout).data.microbatches == (4, 6)


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
def test_padded_rows_choose_no_experts() -> None:
    """A router's bias counts the choices of each chunk, so chunks must be equal."""
    layer = Experts(hidden=3, num_experts=2, router_bias_rate=0.125)
    model = replace(DECODER, layers=(*DECODER.layers[:3], layer))
    scenario = a_scenario("gpipe", rows=(5, 4), model=model)
    assert "padding rows would count for the experts" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_training(scenario.training, scenario.layout).data.microbatches == (6, 4)


def test_smaller_chunks_repeat_their_last_row() -> None:
    """Inputs and masks are padded, but targets are not. Batches of equal chunks stay as they are."""
    rows = torch.arange(5.0)[:, None]
    batch = Batch(inputs=rows, targets=rows, masks=(rows, None))
    padded = with_equal_chunks(batch, 3)
    assert padded.inputs.flatten().tolist() == [0, 1, 2, 3, 4, 4]
    assert padded.masks[0] is not None
    assert padded.masks[0].equal(padded.inputs)
    assert padded.targets.equal(rows)
    assert with_equal_chunks(padded, 3) is padded
