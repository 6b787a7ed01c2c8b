"""Experts on ranks of their own, and their features within on others: what one device computes, with the calls predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equivcheck import check
from equivcheck.export.script import script_of
from equivcheck.layouts.base import local_tensors
from equivcheck.layouts.base.rounding import ONCE
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.composition.registry import when_reduced
from equivcheck.scenario import (
    DDP,
    FSDP2,
    ActivationSharding,
    AnyLayer,
    Attention,
    Checkpointing,
    ExpertParallel,
    Experts,
    Head,
    LayerPlan,
    LocalDataParallel,
    LocalTensorParallel,
    Model,
    Norm,
    NormType,
    Parallelism,
    Scenario,
    ScoreFunction,
    Split,
    Tokens,
)
from support.clipped import clipped_scenario
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

ROWS, WHOLE = ActivationSharding.ROWS, ActivationSharding.REPLICATED
EXPERTS = Experts(hidden=3, num_experts=3, norm=Norm.RMS, bias=True, shared=True, dropout=0.25)
PAIRS = Experts(
    hidden=4, num_experts=5, top_k=2, scores=ScoreFunction.SIGMOID, normalised=True, weighs_input=True, bias=True, dispatched=True
)
EVEN = replace(EXPERTS, hidden=4, num_experts=4)
LAYERS = (Attention(num_heads=4, num_kv_heads=4, head_dim=1, norm=Norm.LAYER), EXPERTS, PAIRS)


def a_scenario(
    output: ActivationSharding = ROWS,
    *around: Parallelism,
    ranks: tuple[int, int] = (2, 2),
    layers: tuple[AnyLayer, ...] = LAYERS,
    outside: bool = False,
    norm: NormType = NormType.TWO,
    **execution: Checkpointing,
) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped; the last layer is outside the plan if it is said so."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=3, layers=layers, head=Head(norm=Norm.RMS))
    entries = [LayerPlan(split=Split.HEADS_OR_HIDDEN, output=output)] * (len(layers) - outside)
    plan = (*entries, *[LayerPlan(split=Split.NOT_IN_PLAN)] * outside)
    inner = LocalTensorParallel(plan=plan, source=Split.ROWWISE, source_output=output, head=Split.COLWISE)
    axes = {**({"dp": 2} if around else {}), "ep": ranks[0], "tp": ranks[1]}
    parallelisms = (inner, ExpertParallel(), *around)
    return clipped_scenario(model, axes, *parallelisms, microbatches=(4, 8), norm_type=norm, **execution)


@pytest.mark.parametrize(("output", "ranks"), [(WHOLE, (2, 2)), (ROWS, (4, 2)), (ROWS, (2, 4)), (WHOLE, (1, 2)), (ROWS, (2, 1))])
def test_experts_and_features_in_parts_equal_one_device(output: ActivationSharding, ranks: tuple[int, int]) -> None:
    """Some ranks have an expert more than others, some none; some have a feature within more, and some none."""
    require_predicted(a_scenario(output, ranks=ranks))


@pytest.mark.parametrize("norm", NormType)
def test_a_norm_is_of_parts_of_either_kind_and_of_both(norm: NormType) -> None:
    """Parameters are cut along one axis, the other, both, or none; some experts are whole on tensor ranks."""
    require_predicted(a_scenario(WHOLE, outside=True, norm=norm, checkpointing=Checkpointing.ODD_LAYERS))


@pytest.mark.parametrize("around", [DDP(), FSDP2(), LocalDataParallel()], ids=lambda around: around.tag)
def test_data_parallelism_around_both_equals_one_device(around: Parallelism) -> None:
    """Over three axes, with the norms of what is cut along none, one or two of them."""
    require_predicted(a_scenario(WHOLE, around, layers=(EVEN, EVEN), outside=True))


def test_processes_compute_the_same() -> None:
    """Gloo moves what simulated ranks move."""
    check(a_scenario(), world="gloo").assert_equivalent()


def test_gradients_are_reduced_once() -> None:
    """Tensor parallelism within reduces none of several microbatches."""
    assert when_reduced(a_scenario().layout) is ONCE


def test_a_script_is_refused_by_name() -> None:
    """Both change what a layer does with rows."""
    with pytest.raises(CannotExport, match="LocalTensorParallel inside ExpertParallel"):
        script_of(a_scenario())


def test_a_norm_of_one_cut_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of what is cut twice is over all ranks."""
    honest = local_tensors.clip_over_groups

    def once(parameters: Any, clipping: Any, cuts: Any) -> Any:
        return honest(parameters, clipping, cuts[:1])

    monkeypatch.setattr(local_tensors, "clip_over_groups", once)
    assert check(a_scenario()).outcome.is_finding
