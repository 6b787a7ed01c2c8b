"""Smaller scenarios of one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivcheck.campaign.findings.size import size_of
from equivcheck.campaign.shrinking.search import Shrinking, same_fingerprint
from equivcheck.campaign.shrinking.simpler import CHANGES, simpler_by
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import (
    Axis,
    Data,
    GatedMLP,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.strategies import scenarios
from unit.campaign import fakes


@settings(max_examples=max(10, settings().max_examples // 4), deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios(resumes=st.booleans()))
def test_what_is_simpler_can_run_and_is_smaller(scenario: Scenario) -> None:
    """Every change leaves what its layout supports and there is less to look at of; of a kind none comes twice."""
    for kind in CHANGES:
        found = list(simpler_by(kind, scenario))
        assert len(set(found)) == len(found)
        for other in found:
            assert size_of(other) < size_of(scenario)
            assert why_unsupported(other) is None


@settings(max_examples=max(10, settings().max_examples // 4), deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios(layouts=("ddp", "fsdp2", "tensor_parallel", "fsdp2 x tensor_parallel")))
def test_single_changes_lead_to_the_plainest_scenario(scenario: Scenario) -> None:
    """Where a fault shows everywhere, one rank, one layer, one step and one row are left, whatever the start."""
    first = fakes.diverged(scenario)
    search = Shrinking(first, lambda smaller, coarse: fakes.diverged(smaller), same=lambda _: True, seconds=60.0)
    best = search.finish().scenario
    training = best.training
    assert (best.layout.mesh.num_ranks, len(training.model.layers), training.steps, training.data.batch) == (1, 1, 1, 1)
    assert training == replace(training, groups=(), clipping=None, schedule=None, seed=0)
    assert best.resume is None


def test_what_is_cut_within_a_layer_shrinks_to_a_linear_that_is_cut() -> None:
    """A fault of cut layers needs no gated perceptron: its plan is changed with it."""
    layers = (GatedMLP(hidden=4), Layer(width=2))
    mesh, plan = Mesh(axes=(Axis(name="tp", size=2),)), (LayerPlan(split=Split.HEADS_OR_HIDDEN), LayerPlan())
    start = Scenario(
        training=Training(model=Model(features=2, layers=layers), data=Data(microbatches=(2,))),
        layout=Layout(mesh=mesh, parallelisms=(TensorParallel(plan=plan),)),
    )

    def judge(scenario: Scenario, _coarse: bool) -> Verdict:
        is_cut = any(entry.split is not Split.REPLICATED for each in scenario.layout.of(TensorParallel) for entry in each.plan)
        return fakes.diverged(scenario) if is_cut else replace(fakes.diverged(scenario), outcome=Outcome.INCONCLUSIVE)

    assert shrinking(fakes.diverged(start), judge).finish().scenario.training.model.layers == (Layer(width=1),)


def shrinking(first: Verdict, judge: Callable[[Scenario, bool], Verdict]) -> Shrinking:
    """A search without a limit to speak of."""

    def asked(scenario: Scenario, *, coarse: bool) -> Verdict:
        return judge(scenario, coarse)

    return Shrinking(first, asked, same=same_fingerprint(first), seconds=60.0)


def wide(scenario: Scenario, least: int) -> Verdict:
    """A divergence where the layer has so many outputs, else nothing."""
    verdict = fakes.diverged(scenario)
    return verdict if scenario.training.model.widths[1] >= least else replace(verdict, outcome=Outcome.INCONCLUSIVE)


def test_what_only_the_coarse_judgement_finds_is_not_kept() -> None:
    """The smallest scenario that holds in full is left, of those that were offered and of those tried later."""
    search = shrinking(wide(fakes.scenario(width=30), 1), lambda scenario, coarse: wide(scenario, 2 if coarse else 9))
    assert search.coarse
    for width in (20, 12, 5, 2):
        assert search.offer(wide(fakes.scenario(width=width), 2))
    assert search.finish().scenario == fakes.scenario(width=12, ranks=1)


def test_the_coarse_judgement_is_used_only_where_it_sees_the_fault() -> None:
    """If the scenario to begin with is no divergence for it, or another, every judgement is in full."""
    asked = []

    def judge(scenario: Scenario, coarse: bool) -> Verdict:
        asked.append(coarse)
        return fakes.diverged(scenario, tensor="elsewhere") if coarse else wide(scenario, 3)

    search = shrinking(wide(fakes.scenario(width=4), 3), judge)
    assert not search.coarse
    assert search.finish().scenario == fakes.scenario(width=3, ranks=1)
    assert asked.count(True) == 1


def test_another_fault_is_no_smaller_example() -> None:
    """What fails in another way is not taken for the fault that shrinks."""
    first = wide(fakes.scenario(width=4), 1)
    search = shrinking(first, lambda scenario, coarse: fakes.diverged(scenario, tensor="elsewhere"))
    assert not search.offer(fakes.diverged(fakes.scenario(width=1), tensor="elsewhere"))
    assert search.finish() == first
