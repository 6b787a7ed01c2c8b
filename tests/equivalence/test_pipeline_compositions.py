"""Pipelines together with parallelisms around their stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import check
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.scenario import (
    FSDP1,
    Axis,
    Layer,
    Layout,
    LocalDataParallel,
    Loss,
    Mesh,
    Model,
    Pipeline,
    Scenario,
    ZeroGrad,
)
from support.clipped import clipped_scenario
from support.exported import run_script
from support.staged import DECODER, PIPELINES
from support.supported import require_supported

pytestmark = pytest.mark.mostly_equivalent


def a_scenario(pipeline: Pipeline, *, stages: int = 2, ranks: int = 2, flat: bool = False, model: Model = DECODER) -> Scenario:
    """Two clipped steps of two microbatches of unequal size, on `ranks` pipelines."""
    parallelisms = (pipeline, LocalDataParallel(flat_buffer=flat))
    loss = {} if model is DECODER else {"loss": Loss.MSE_SUM}
    return clipped_scenario(
        model, {"dp": ranks, "pp": stages}, *parallelisms, microbatches=(16, 8), zero_grad=ZeroGrad.ZERO, **loss
    )


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_that_average_gradients_equal_one_device(name: str, flat: bool) -> None:
    """Each pipeline has its own rows, and all collectives are as predicted."""
    scenario = a_scenario(PIPELINES[name], flat=flat)
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert "sends and receives" in verdict.unmodelled


@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (2, 1), (4, 2)])
def test_groups_of_one_rank_and_large_meshes_equal_one_device(stages: int, ranks: int) -> None:
    """A pipeline may have one rank, and so may the data-parallel axis."""
    scenario = a_scenario(Pipeline(num_chunks=max(2, stages)), stages=stages, ranks=ranks)
    require_supported(scenario)
    check(scenario).assert_equivalent()


def test_weights_of_some_ranks_are_summed_within_each_pipeline() -> None:
    """Copies on two of three ranks have a group of their own in each pipeline."""
    layers = (Layer(width=2), Layer(width=2), Layer(width=2, shares=0))
    scenario = a_scenario(Pipeline(num_chunks=2), stages=3, model=Model(features=2, layers=layers))
    require_supported(scenario)
    (pipeline,) = scenario.layout.of(Pipeline)
    assert [weight.ranks for weight in weights_of_several_ranks(scenario.training.model, pipeline, 3)] == [(0, 2)]
    check(scenario).assert_equivalent()


def test_processes_compute_the_same() -> None:
    """Gloo sums what simulated ranks sum."""
    scenario = a_scenario(PIPELINES["gpipe"])
    require_supported(scenario)
    check(scenario, world="gloo").assert_equivalent()


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_a_script_computes_what_ranks_compute(name: str, tmp_path: Path) -> None:
    """A script takes a rank's stages from its place in its pipeline, not from its global rank."""
    scenario = a_scenario(PIPELINES[name])
    require_supported(scenario)
    script, _ = run_script(scenario, tmp_path)
    assert 'mesh["pp"].get_local_rank()' in script


def test_data_parallelism_is_applied_to_stages() -> None:
    """A layout in the wrong order is refused, and repaired to the right order."""
    right = a_scenario(Pipeline(num_chunks=2))
    wrong = replace(right.layout, parallelisms=right.layout.parallelisms[::-1])
    assert "applied before it" in (limit_reason(right.training, wrong) or "")
    assert repair_layout(wrong) == repair_layout(right.layout)


def test_wrappers_of_the_models_forward_are_refused() -> None:
    """A schedule would call their stages without them."""
    scenario = a_scenario(Pipeline(num_chunks=2))
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="pp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(Pipeline(num_chunks=2), FSDP1()))
    assert "a schedule calls stages" in (limit_reason(scenario.training, layout) or "")
    assert repair_layout(layout).name == "pipeline"
