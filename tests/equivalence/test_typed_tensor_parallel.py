"""Tensor parallelism on plain tensors by the collectives of spmd_types: what one device computes, with the calls predicted."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from packaging.version import Version

from equivcheck import Outcome, check
from equivcheck.export.script import script_of
from equivcheck.layouts.base.limits.repairs import has_routing
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import limit_reason, repair_layout, why_unsupported
from equivcheck.layouts.composition.resume_limits import CHECKPOINT_LAYOUT_LIMITS
from equivcheck.scenario import (
    FSDP2,
    ActivationSharding,
    Attention,
    Checkpointing,
    Collectives,
    Compile,
    Execution,
    Experts,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    LocalTensorParallel,
    Model,
    Norm,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
)
from equivcheck.strategies import scenarios
from equivcheck.system import torch_version
from support.clipped import clipped_scenario
from support.supported import TYPED
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

WHOLE, ROWS, FEATURES = ActivationSharding.REPLICATED, ActivationSharding.ROWS, ActivationSharding.FEATURES
MODEL = Model(
    features=5,
    source=Tokens(vocabulary=5, padding=1, learned_positions=True),
    length=3,
    layers=(
        Attention(num_heads=4, num_kv_heads=4, head_dim=2, bias=True, norm=Norm.RMS),
        GatedMLP(hidden=8, bias=True, norm=Norm.LAYER),
        Layer(width=7),
        Layer(width=5),
    ),
    head=Head(norm=Norm.RMS, bias=True),
)


def a_scenario(output: ActivationSharding = ROWS, *around: Parallelism, ranks: int = 2, **execution: Any) -> Scenario:
    """Two steps, clipped; columns left in parts of features or of positions before rows, and the loss of logits in parts."""
    between = FEATURES if output is WHOLE else output
    plan = (
        LayerPlan(split=Split.HEADS_OR_HIDDEN, output=output),
        LayerPlan(split=Split.HEADS_OR_HIDDEN, output=output),
        LayerPlan(split=Split.COLWISE, output=between),
        LayerPlan(split=Split.ROWWISE, output=output),
    )
    parallelism = LocalTensorParallel(
        plan=plan,
        source=Split.ROWWISE,
        source_output=output,
        head=Split.COLWISE,
        loss_parallel=True,
        collectives=Collectives.TYPED,
    )
    axes = {**({"dp": 2} if around else {}), "tp": ranks}
    return clipped_scenario(MODEL, axes, parallelism, *around, **execution)


@TYPED
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("output", [WHOLE, ROWS])
def test_uneven_and_empty_parts_equal_one_device(ranks: int, output: ActivationSharding) -> None:
    """Five tokens, five features and three positions over up to four ranks, with every call as predicted."""
    require_predicted(a_scenario(output, ranks=ranks))


@TYPED
def test_layers_that_are_recomputed_inside_shards_equal_one_device() -> None:
    """Calls come again where layers are recomputed."""
    require_predicted(a_scenario(ROWS, FSDP2(), checkpointing=Checkpointing.EVERY_LAYER))


@TYPED
def test_the_largest_logit_is_gathered() -> None:
    """The library has no maximum over ranks: the one call that differs from those of functional collectives."""
    typed, functional = (
        check(replace(scenario, layout=replace(scenario.layout, parallelisms=(parallelism,))))
        for scenario in [a_scenario()]
        for parallelism in (scenario.layout.parallelisms[0], functional_of(scenario))
    )
    names = [[call.op for call in verdict.calls[0]] for verdict in (typed, functional)]
    assert "all_reduce.max" not in names[0]
    assert sorted(names[0]) == sorted("all_gather" if name == "all_reduce.max" else name for name in names[1])


def functional_of(scenario: Scenario) -> LocalTensorParallel:
    """The same by functional collectives."""
    (parallelism,) = scenario.layout.of(LocalTensorParallel)
    return replace(parallelism, collectives=Collectives.FUNCTIONAL)


@TYPED
@given(scenarios(layouts=(LocalTensorParallel.tag,)))
@settings(deadline=None, max_examples=10, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
def test_generated_scenarios_equal_one_device(scenario: Scenario) -> None:
    """Whatever is drawn, by types."""
    (parallelism,) = scenario.layout.of(LocalTensorParallel)
    assume(scenario.resume is None)
    layout = replace(scenario.layout, parallelisms=(replace(parallelism, collectives=Collectives.TYPED),))
    check(replace(scenario, layout=layout)).assert_no_finding()


@pytest.mark.slow
@TYPED
def test_a_compiled_model_computes_the_same() -> None:
    """In processes."""
    check(a_scenario(compile=Compile.AOT_EAGER)).assert_equivalent()


@TYPED
@pytest.mark.torch(">=2.12", "earlier versions guard what they compare")
def test_compiled_experts_are_not_run() -> None:
    """Their input would have a gradient that is summed over ranks which have all of it."""
    case = a_scenario(compile=Compile.AOT_EAGER)
    model = replace(case.training.model, layers=(Experts(hidden=3), *case.training.model.layers[1:]))
    experts = replace(case, training=replace(case.training, model=model))
    assert "pytorch#196173" in (why_unsupported(experts) or "")
    assert not has_routing(fit_scenario(experts).training.model)
    eager = replace(experts, layout=replace(experts.layout, execution=Execution()))
    assert why_unsupported(eager) is None


MISTAKES = {
    "does not add up gradients of copies": ("_copied", lambda _ranks, values: values),
    "averages": ("_summed", lambda ranks, addend, target: RIGHT["_summed"](ranks, addend / ranks.size, target)),
    "gathers with gradients of its own": (
        "_whole",
        lambda ranks, part, dim, extent, _kind: RIGHT["_whole"](ranks, part, dim, extent, typed_regions().spmd.I),
    ),
    "turns its part round": ("_own", lambda ranks, part, extent: RIGHT["_own"](ranks, part.flip(0), extent)),
    "takes the maximum of its own": ("maximum", lambda _ranks, values: values),
}
RIGHT: dict[str, Any] = {}


def typed_regions() -> Any:
    """The module, which needs the package."""
    from equivcheck.layouts.parallelisms.local_tensor_parallel import typed_regions

    return typed_regions


@TYPED
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of what such code gets wrong."""
    name, wrong = MISTAKES[mistake]
    RIGHT[name] = getattr(typed_regions().TypedRanks, name)
    monkeypatch.setattr(typed_regions().TypedRanks, name, wrong)
    assert check(a_scenario()).outcome.is_finding


def test_without_its_package_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit says which package is missing, and the nearest layout does without."""
    found = importlib.util.find_spec

    def without(name: str, *rest: Any) -> ModuleSpec | None:
        return None if name == "spmd_types" else found(name, *rest)

    monkeypatch.setattr("equivcheck.layouts.parallelisms.local_tensor_parallel.limits.find_spec", without)
    scenario = a_scenario()
    assert "pip install spmd_types" in (limit_reason(scenario.training, scenario.layout) or "")
    assert check(scenario).outcome is Outcome.UNSUPPORTED
    assert repair_layout(scenario.layout).parallelisms == (functional_of(scenario),)


def test_on_a_torch_that_its_package_cannot_use_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is installed; the nearest layout does without."""
    monkeypatch.setattr(torch_version, "_installed", lambda: Version("2.9.1"))
    monkeypatch.setattr("equivcheck.layouts.parallelisms.local_tensor_parallel.limits.find_spec", lambda _name: True)
    scenario = a_scenario()
    assert "cannot be imported" in (limit_reason(scenario.training, scenario.layout) or "")
    assert repair_layout(scenario.layout).parallelisms == (functional_of(scenario),)


def test_a_script_needs_torch_alone() -> None:
    """What needs another package is refused by name."""
    scenario = a_scenario()
    parallelism = replace(scenario.layout.of(LocalTensorParallel)[0], loss_parallel=False)
    with pytest.raises(CannotExport, match="spmd_types"):
        script_of(replace(scenario, layout=replace(scenario.layout, parallelisms=(parallelism,))))


def test_a_checkpoint_has_the_same_plan_on_dtensors() -> None:
    """Whatever the collectives, which DTensors know nothing of."""
    layout = a_scenario().layout
    (limit,) = (each for each in CHECKPOINT_LAYOUT_LIMITS if each.applies(layout))
    (of_dtensors,) = limit.repair(layout).of(TensorParallel)
    assert of_dtensors.plan == layout.of(LocalTensorParallel)[0].plan
    assert "collectives" not in {field.name for field in fields(of_dtensors)}
