"""Experts whose features within ranks share out, on plain tensors: what one device computes, with the calls predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equivcheck import check
from equivcheck.checking.beyond import check_beyond
from equivcheck.layouts.composition.limits import limit_reason, repair_training
from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalRegion
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    ActivationSharding,
    Axis,
    Checkpointing,
    Collectives,
    ContextParallel,
    Data,
    Experts,
    GatedMLP,
    Head,
    LayerPlan,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Replicate,
    Scenario,
    ScoreFunction,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from support.clipped import clipped_scenario
from support.exported import run_script
from support.supported import TYPED
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

WHOLE, ROWS = ActivationSharding.REPLICATED, ActivationSharding.ROWS
AFTER = Experts(hidden=3, num_experts=3, norm=Norm.RMS, bias=True, shared=True, dropout=0.25)
BEFORE = Experts(hidden=5, num_experts=4, top_k=2, scores=ScoreFunction.SIGMOID, normalised=True, weighs_input=True, bias=True)
LAYERS = (AFTER, BEFORE, replace(BEFORE, weighs_input=False, dispatched=True), replace(AFTER, weighs_input=True, dispatched=True))


def a_scenario(
    output: ActivationSharding = ROWS,
    *around: Parallelism,
    layers: tuple[Experts, ...] = LAYERS,
    ranks: int = 2,
    collectives: Collectives = Collectives.FUNCTIONAL,
    **execution: Checkpointing,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped: experts weighted before and after, all rows or those that chose."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=3, layers=layers, head=Head(norm=Norm.LAYER))
    plan = (LayerPlan(split=Split.HEADS_OR_HIDDEN, output=output),) * len(layers)
    parallelism = LocalTensorParallel(
        plan=plan, source=Split.ROWWISE, source_output=output, head=Split.COLWISE, collectives=collectives
    )
    outer = {"cp" if isinstance(each, ContextParallel) else "dp": 2 for each in reversed(around)}
    return clipped_scenario(model, {**outer, "tp": ranks}, parallelism, *around, **execution)


@pytest.mark.parametrize(("output", "ranks"), [(WHOLE, 2), (WHOLE, 4), (ROWS, 1), (ROWS, 2), (ROWS, 4)])
def test_uneven_and_empty_parts_equal_one_device(output: ActivationSharding, ranks: int) -> None:
    """Three and five features within over four ranks: the last has none of either."""
    require_predicted(a_scenario(output, ranks=ranks))


def test_gradients_are_ready_in_the_order_that_buckets_are_predicted_by() -> None:
    """Of a bias that is added once before that of its weight: a few gradients go into each bucket of DDP."""
    for capacity in (0.0001, 0.0002, 0.0004):
        require_predicted(a_scenario(WHOLE, DDP(bucket_cap_mb=capacity)))


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_experts_equal_one_device(frozen: int) -> None:
    """What comes before frozen ones learns through them; of frozen ones that come first, nothing is summed in backward."""
    layers = tuple(replace(layer, frozen=index == frozen) for index, layer in enumerate(LAYERS))
    case = a_scenario(WHOLE, layers=layers)
    tokens = replace(case.training.model, source=Tokens(vocabulary=7, frozen=True))
    require_predicted(replace(case, training=replace(case.training, model=tokens)))


@TYPED
def test_typed_collectives_move_the_same() -> None:
    """A bias that is added once is an addend of a partial sum there."""
    require_predicted(a_scenario(ranks=4, collectives=Collectives.TYPED))


@pytest.mark.parametrize(
    "around",
    [
        (DDP(no_sync=True),),
        (FSDP2(wrapping=Wrapping.PER_LAYER),),
        (Replicate(),),
        (LocalDataParallel(flat_buffer=True),),
        (ContextParallel(),),
        (ContextParallel(), LocalDataParallel()),
    ],
    ids=lambda around: " ".join(each.tag for each in around),
)
def test_parallelism_around_it(around: tuple[Parallelism, ...]) -> None:
    """Parts are plain tensors, which others average, sum or shard; calls come again where layers are recomputed."""
    require_predicted(a_scenario(ROWS, *around, layers=LAYERS[:2], checkpointing=Checkpointing.ODD_LAYERS))


def test_parts_in_a_flat_parameter() -> None:
    """FSDP1 cuts what a rank has of three dims wherever its flat parameter ends."""
    case = a_scenario(ROWS, FSDP1(wrapping=Wrapping.PER_LAYER), layers=LAYERS[1:3])
    require_predicted(replace(case, training=replace(case.training, clipping=None)))


def test_columns_of_experts_of_which_a_rank_has_no_row_are_on_file() -> None:
    """One feature within over two ranks, cut by the last dim besides, which `fully_shard` refuses on the second alone."""
    model = Model(features=1, layers=(Experts(hidden=1),))
    inner = LocalTensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),))
    layout = Layout(
        mesh=Mesh(axes=(Axis(name="dp", size=1), Axis(name="tp", size=2))), parallelisms=(inner, FSDP2(shard_last_dim=True))
    )
    verdict = check_beyond(Scenario(training=Training(model=model, data=Data(microbatches=(1,))), layout=layout))
    assert verdict.known == "fully_shard_columns_of_nothing"


def test_dtensors_cut_no_experts() -> None:
    """The limit says why; what repairs it is one expert for all rows."""
    case = a_scenario(layers=(BEFORE,))
    plan = case.layout.of(LocalTensorParallel)[0].plan
    layout = replace(
        case.layout, parallelisms=(TensorParallel(plan=plan, head=Split.COLWISE, source=Split.ROWWISE, source_output=ROWS),)
    )
    assert "partial sums of its output" in (limit_reason(case.training, layout) or "")
    (layer,) = repair_training(case.training, layout).model.layers
    assert isinstance(layer, GatedMLP)


def test_a_script_has_the_region_of_each_layer(tmp_path: Path) -> None:
    """Functions of experts with other linears have names of their own."""
    case = a_scenario(layers=(replace(AFTER, dropout=0.0), replace(BEFORE, bias=False)))
    _, differences = run_script(case, tmp_path)
    assert any("shared.down_bias" in place for place in differences)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "sums no gradients": (LocalRegion, "copy_to_ranks", lambda _region, values, weights: (values, weights)),
    "adds a bias on each rank": (AxisRanks, "bias_on_first_rank", lambda _ranks, bias: bias),
    "adds a bias on none": (AxisRanks, "bias_on_first_rank", lambda _ranks, bias: bias * 0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong is a finding."""
    monkeypatch.setattr(*MISTAKES[mistake])
    assert check(a_scenario(layers=LAYERS[:1])).outcome.is_finding
