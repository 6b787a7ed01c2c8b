"""Data parallelism by hand: what one device computes, with the calls that are predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from equivcheck import Outcome, check
from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.composition.limits import limit_reason, repair_layout_for_resume
from equivcheck.scenario import (
    FSDP2,
    Attention,
    AttentionExchange,
    AuxiliaryLinear,
    Axis,
    Compile,
    ContextParallel,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Head,
    Layer,
    LayerPlan,
    LocalDataParallel,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    ZeroGrad,
)
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.worlds.trace.stage import Stage
from support.clipped import clipped_scenario
from support.exported import run_script
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

DECODER = Model(
    features=4,
    source=Tokens(vocabulary=5, padding=1),
    length=3,
    layers=(
        Attention(num_heads=2, num_kv_heads=2, head_dim=2, bias=True, norm=Norm.RMS),
        Layer(width=4, residual=True, auxiliary=AuxiliaryLinear.EVEN_STEPS),
        Experts(hidden=3, num_experts=3, top_k=1),
    ),
    head=Head(norm=Norm.RMS),
)
SHARED_OUT = LocalTensorParallel(
    plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN), LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.NOT_IN_PLAN)),
    source=Split.ROWWISE,
    head=Split.COLWISE,
)
INNER: dict[str, tuple[str, Parallelism]] = {
    "tp": ("tp", SHARED_OUT),
    "cp": ("cp", ContextParallel(exchange=AttentionExchange.RING)),
    "ep": ("ep", ExpertParallel()),
}


def a_scenario(*inner: tuple[str, Parallelism], ranks: int = 2, flat: bool = False, **execution: Any) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped; a linear that takes part in the first step alone."""
    axes = {"dp": ranks, **{name: 2 for name, _ in inner}}
    parallelisms = (*(each for _, each in inner), LocalDataParallel(flat_buffer=flat))
    return clipped_scenario(DECODER, axes, *parallelisms, microbatches=(8, 4), zero_grad=ZeroGrad.ZERO, **execution)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("inner", [None, *INNER])
def test_averaged_gradients_equal_one_device(inner: str | None, flat: bool) -> None:
    """Alone, and of parts of parameters, of positions and of experts, with every call as predicted."""
    require_predicted(a_scenario(*([INNER[inner]] if inner else []), flat=flat))


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_sums_each_gradient_once_or_all_at_once(flat: bool) -> None:
    """Whatever the number of microbatches."""
    scenario = a_scenario(flat=flat)
    num_gradients = sum(parameter.trained for parameter in parameters_of(DECODER))
    verdict = check(scenario)
    sums = Counter(call.step for call in verdict.calls[0] if call.op == "all_reduce.sum" and call.stage is Stage.COMPUTE)
    assert sums == dict.fromkeys((0, 1), 1 if flat else num_gradients)


@pytest.mark.parametrize("inner", ["tp", "cp"])
def test_processes_compute_the_same(inner: str) -> None:
    """Gloo sums what simulated ranks sum."""
    check(a_scenario(INNER[inner], flat=inner == "tp"), world="gloo").assert_equivalent()


@pytest.mark.slow
def test_a_compiled_model_is_averaged_as_another() -> None:
    """Gradients are reduced outside of what is compiled."""
    check(a_scenario(compile=Compile.AOT_EAGER)).assert_equivalent()


@pytest.mark.parametrize(("inner", "flat"), [(None, True), ("tp", False), ("cp", True), ("ep", True)])
def test_a_script_computes_what_ranks_compute(inner: str | None, flat: bool, tmp_path: Path) -> None:
    """A script of torch alone has the sums and quotients in full."""
    scenario = a_scenario(*([INNER[inner]] if inner else []), flat=flat)
    run_script(scenario, tmp_path)


def test_a_checkpoint_has_dtensors_in_place_of_plain_parts() -> None:
    """Experts know of what they are parts then; what is cut by plan as well becomes shards over all ranks."""
    layout = a_scenario(INNER["ep"], ranks=3).layout
    kept = (ExpertParallel(storage=ExpertStorage.DTENSOR), *layout.parallelisms[1:])
    assert repair_layout_for_resume(layout) == replace(layout, parallelisms=kept)
    planned = repair_layout_for_resume(a_scenario(INNER["tp"], ranks=3).layout)
    assert planned.parallelisms == (FSDP2(),)
    assert planned.mesh == Mesh(axes=(Axis(name="dp", size=6),))


def test_what_leaves_no_plain_gradients_is_refused() -> None:
    """The limit says which do."""
    scenario = a_scenario(("tp", TensorParallel(plan=SHARED_OUT.plan)))
    assert "averages plain gradients" in (limit_reason(scenario.training, scenario.layout) or "")


def _last_is_missing(parameters: Any, group: dist.ProcessGroup) -> None:
    """A buffer that one gradient was left out of."""
    for gradient in list(gradients_by_hand.held_gradients(parameters))[:-1]:
        dist.all_reduce(gradient, group=group)


def _in_another_order(parameters: Any, group: dist.ProcessGroup) -> None:
    """Sums are put back from the end of the buffer."""
    gradients = list(gradients_by_hand.held_gradients(parameters))
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(buffer, group=group)
    for gradient, summed in zip(gradients, torch.split(buffer, [each.numel() for each in gradients[::-1]][::-1]), strict=True):
        gradient.copy_(summed.flip(0).view_as(gradient))


MISTAKES = {
    "reduces nothing": ("sum_flat_gradients", lambda _parameters, _group: None),
    "leaves a gradient out": ("sum_flat_gradients", _last_is_missing),
    "puts sums back in another order": ("sum_flat_gradients", _in_another_order),
    "leaves sums": ("divide_gradients", lambda _parameters, _number: None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an honest reference."""
    monkeypatch.setattr(gradients_by_hand, *MISTAKES[mistake])
    assert check(a_scenario(flat=True)).outcome is Outcome.DIVERGED
