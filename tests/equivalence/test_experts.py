"""Experts that a router chooses among: what one device computes under every layout, and no proof where rounding chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AdamW,
    Axis,
    Checkpointing,
    Compile,
    CrossEntropy,
    Data,
    Execution,
    Experts,
    Head,
    Layout,
    LowPrecision,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Precision,
    Scenario,
    ScoreFunction,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.strategies import executions, scenarios, token_models, trainings
from equivcheck.training import material
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.setup import Setup
from support.exported import run_script
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

EXAMPLES = max(2, settings().max_examples // 50)
EXPERTS = Experts(hidden=3, num_experts=5, top_k=2, scores=ScoreFunction.SIGMOID, normalised=True, norm=Norm.RMS, shared=True)


def a_scenario(*parallelisms: Parallelism, layer: Experts = EXPERTS, **execution: Checkpointing) -> Scenario:
    """Two steps of two microbatches of unequal size."""
    model = Model(features=4, source=Tokens(vocabulary=7), length=3, layers=(layer, layer), head=Head())
    training = Training(model=model, data=Data(microbatches=(4, 2)), loss=CrossEntropy(), optimizer=AdamW(), steps=2)
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    layout = Layout(mesh=mesh, parallelisms=parallelisms or (DDP(),), execution=Execution(**execution))
    return Scenario(training=training, layout=layout)


MODELS = token_models().filter(lambda model: any(isinstance(layer, Experts) for layer in model.layers))
EAGERLY = executions().filter(lambda execution: not execution.is_compiled)


@pytest.mark.parametrize("layout", layout_kinds())
@pytest.mark.filterwarnings("ignore")
def test_experts_equal_one_device(layout: str) -> None:
    """Whatever a router chooses, under any parallelism, some experts without a position on a rank, or on all."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenarios(trainings=trainings(models=MODELS), layouts=(layout,), executions=EAGERLY))
    def equal(scenario: Scenario) -> None:
        check(scenario).assert_no_finding()

    equal()


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("around", [DDP(bucket_cap_mb=1e-4), FSDP2(wrapping=Wrapping.PER_LAYER)], ids=["ddp", "fsdp2"])
def test_calls_are_those_of_any_layer(around: Parallelism, dispatched: bool) -> None:
    """Every parameter has a gradient on every rank, in an order that is known, as buckets that hold one each tell."""
    layer = replace(EXPERTS, dispatched=dispatched, bias=True)
    require_predicted(a_scenario(around, layer=layer, checkpointing=Checkpointing.ODD_LAYERS))


@pytest.mark.parametrize("dispatched", [False, True])
def test_buckets_under_autocast_follow_the_order_of_its_casts(dispatched: bool) -> None:
    """The shared expert's weights come before their biases there, so buckets that hold some pairs have other members."""
    layer = Experts(hidden=8, top_k=2, dispatched=dispatched, bias=True, shared=True)
    found = a_scenario(DDP(autocast=LowPrecision.BFLOAT16, bucket_cap_mb=7e-5), layer=layer)
    training = replace(found.training, model=replace(found.training.model, features=8), precision=Precision.FLOAT32)
    require_predicted(replace(found, training=training))


def test_positions_that_are_not_put_back_are_caught() -> None:
    """What experts make of a rank's positions is added to others."""

    def plant(setup: Setup) -> None:
        layer = _first(setup)
        honest = layer.dispatched
        layer.dispatched = lambda *given: honest(*given).roll(1, 0)  # type: ignore[method-assign]

    assert check(a_scenario(layer=replace(EXPERTS, dispatched=True)), alter=plant).outcome is Outcome.DIVERGED


def _first(setup: Setup) -> ExpertsModule:
    layer = setup.model.get_submodule("layers.0")
    assert isinstance(layer, ExpertsModule)
    return layer


@pytest.mark.parametrize("altered", [False, True])
def test_choices_that_rounding_moves_prove_nothing(monkeypatch: pytest.MonkeyPatch, altered: bool) -> None:
    """Where a copy chooses other experts, it is inconclusive that ranks agree, and that they do not."""
    draw = material._draw_parameters

    def alike(*given: object) -> dict[str, material.Array]:
        drawn = draw(*given)  # type: ignore[arg-type]
        drawn["layers.1.router.weight"][1] = drawn["layers.1.router.weight"][0] = drawn["layers.1.router.weight"].sum(0)
        return drawn

    def last_of_equals(setup: Setup) -> None:
        router = setup.model.get_submodule("layers.1.router")
        chosen = router.chosen  # type: ignore[union-attr]
        router.chosen = lambda scores: chosen(scores.flip(-1)).flip(-1)  # type: ignore[union-attr]

    monkeypatch.setattr(material, "_draw_parameters", alike)
    scenario = a_scenario(layer=replace(EXPERTS, top_k=1, normalised=False))
    verdict = check(replace(scenario, training=replace(scenario.training, seed=12345)), alter=last_of_equals if altered else None)
    material.material.cache_clear()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "rounding changes the chosen experts at step 0" in verdict.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallelisms": (DDP(autocast=LowPrecision.BFLOAT16),)}, "rounds to other element types"),
        ({"execution": Execution(compile=Compile.AOT_EAGER)}, "shapes that depend on values"),
        (
            {"execution": Execution(compiled_autograd=True, checkpointing=Checkpointing.EVERY_LAYER)},
            "shapes that depend on values",
        ),
    ],
    ids=["rounds", "compiled", "compiled and recomputed"],
)
def test_what_follows_values_has_limits(changes: dict[str, Any], reason: str) -> None:
    """Neither scores in few digits nor rows of unknown number in a graph; what repairs them is what is left."""
    scenario = a_scenario(layer=replace(EXPERTS, dispatched=True))
    scenario = replace(scenario, layout=replace(scenario.layout, **changes))
    assert reason in (why_unsupported(scenario) or "")
    training = repair_training(scenario.training, scenario.layout)
    assert why_unsupported(replace(scenario, training=training)) is None
    assert training.model.layers[0] in (EXPERTS, EXPERTS.without_routing())


def test_recomputed_experts_are_not_compiled_backward() -> None:
    """Compiling them takes minutes; those that are not recomputed stay."""
    execution = Execution(compiled_autograd=True, checkpointing=Checkpointing.ODD_LAYERS)
    scenario = a_scenario(layer=EXPERTS)
    layers = (EXPERTS, EXPERTS)
    training = replace(scenario.training, model=replace(scenario.training.model, layers=layers))
    layout = replace(scenario.layout, execution=execution)
    assert "recomputing" in (why_unsupported(replace(scenario, training=training, layout=layout)) or "")
    assert repair_training(training, layout).model.layers == (EXPERTS, EXPERTS.without_routing())


@given(st.integers(2, 8), st.integers(1, 2), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_of_equal_scores_the_first_is_chosen(num_experts: int, top_k: int, scores: list[int]) -> None:
    """Rows of zeros, which every arithmetic scores alike, choose alike."""
    router = ExpertsModule(Experts(hidden=1, num_experts=num_experts, top_k=top_k), 2).router
    given_scores = scores[:num_experts]
    order = sorted(range(num_experts), key=lambda expert: (-given_scores[expert], expert))
    chosen = router.chosen(torch.tensor(given_scores, dtype=torch.float64))
    assert chosen.nonzero().flatten().tolist() == sorted(order[:top_k])


@pytest.mark.parametrize("layer", [EXPERTS, Experts(hidden=2, num_experts=3, weighs_input=True, bias=True, dispatched=True)])
def test_a_script_routes_as_the_module_does(layer: Experts, tmp_path: Path) -> None:
    """It trains the same on two ranks, and exits with 0."""
    _, printed = run_script(a_scenario(layer=layer), tmp_path, numbers=None)
    assert any("experts.gate" in place for place in printed)
    assert max(printed.values()) < 1e-9
