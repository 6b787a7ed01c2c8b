"""Scenarios on more ranks."""

from dataclasses import replace

import pytest

from equivcheck import UsageError
from equivcheck.checking.dry_run.grow import scenario_on_ranks, small_scenario
from equivcheck.scenario import DDP, Axis, Layout, Mesh, TensorParallel
from unit.checking.dry_run.examples import PLAN, fsdp2_over_tensor_parallel


def test_the_data_axis_grows_and_rows_with_it() -> None:
    """Tensor-parallel groups keep their size, and data ranks their rows."""
    big = scenario_on_ranks(fsdp2_over_tensor_parallel(2, 2), 4096)
    assert big.layout.mesh.shape == (2048, 2)
    assert big.training.data.microbatches == (3 * 2048,)


def test_without_a_data_axis_the_outermost_one_grows() -> None:
    """Tensor parallelism is spread over more ranks, with the same rows."""
    small = fsdp2_over_tensor_parallel()
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(TensorParallel(plan=PLAN),))
    big = scenario_on_ranks(replace(small, layout=layout), 16)
    assert big.layout.mesh.shape == (16,)
    assert big.training.data == small.training.data


def test_ranks_that_do_not_fill_the_mesh_are_refused() -> None:
    """The error names the other axes and the multiple."""
    with pytest.raises(UsageError, match=r"ranks 4095 .* fsdp2 x tensor_parallel keeps the axes tp 2\. Expected a multiple of 2"):
        scenario_on_ranks(fsdp2_over_tensor_parallel(), 4095)


def test_a_small_world_has_every_axis() -> None:
    """A scenario with many ranks is reduced; one with few ranks is unchanged."""
    assert small_scenario(fsdp2_over_tensor_parallel(512, 8)).layout.mesh.shape == (2, 2)
    assert small_scenario(fsdp2_over_tensor_parallel(4, 2)) == fsdp2_over_tensor_parallel(4, 2)


def test_an_axis_of_one_stays_one() -> None:
    """A dry run on one rank compares one rank with one rank."""
    one = Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))
    scenario = replace(fsdp2_over_tensor_parallel(1), layout=one)
    assert small_scenario(scenario) == scenario
