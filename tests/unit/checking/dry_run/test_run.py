"""Dry runs."""

import pytest

from equivcheck import UsageError
from equivcheck.checking.dry_run import run
from equivcheck.checking.dry_run.grow import scenario_on_ranks
from equivcheck.checking.dry_run.run import dry_run
from equivcheck.layouts.composition.expected_calls import Prediction
from equivcheck.oracle.comparison import communication
from equivcheck.scenario import FSDP2, Axis, Data, Layer, Layout, Mesh, Model, Pipeline, Scenario, Training
from equivcheck.worlds.trace.stage import Stage
from unit.checking.dry_run.examples import fsdp2_over_tensor_parallel


def test_thousands_of_ranks_are_counted_and_verified() -> None:
    """4,096 ranks hold and send as much as computed."""
    found = dry_run(scenario_on_ranks(fsdp2_over_tensor_parallel(2, 8), 4096))
    assert found.problems == ()
    assert [plan.rank for plan in found.plans] == [0, 4095]
    assert [plan.coordinates for plan in found.plans] == [(0, 0), (511, 7)]
    first = {holding.name: holding.local_shape for holding in found.plans[0].holdings}
    assert first["layers.0.linear.weight"] == (1, 16)  # 32 rows over 8 are 4, over 512 are 1
    assert first["layers.1.linear.weight"] == (1, 4)  # 32 columns over 8 are 4, 16 rows over 512 are 1
    assert found.plans[1].parameter_bytes == 0


def test_bytes_are_those_of_the_shards() -> None:
    """Eight bytes per element. AdamW keeps two tensors as large as each parameter, and a step count with four bytes."""
    plan = dry_run(fsdp2_over_tensor_parallel(2, 2)).plans[0]
    elements = 16 * 16 // 2 + 16 // 2 + 16 * 16 // 2 + 16 // 2
    assert plan.parameter_bytes == 8 * elements
    assert plan.optimizer_bytes == 2 * 8 * elements + 4 * 4


def test_reading_is_not_counted() -> None:
    """Calls that only read results are not counted."""
    stages = {entry.stage for entry in dry_run(fsdp2_over_tensor_parallel()).plans[0].traffic}
    assert stages == {Stage.SETUP, Stage.COMPUTE, Stage.CLIPPING}


def test_a_shard_of_another_shape_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has rank, parameter, and both shapes."""
    monkeypatch.setattr(run, "local_shape", lambda layout, parameter, coordinates: parameter.shape)
    problems = dry_run(fsdp2_over_tensor_parallel()).problems
    assert "rank 0 holds [8, 16] of layers.0.linear.weight, expected [32, 16]" in problems


def test_another_number_of_calls_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are compared with a small world in which every rank runs."""
    real = run._small_traffic
    monkeypatch.setattr(run, "_small_traffic", lambda small: real(small)[1:])
    found = dry_run(scenario_on_ranks(fsdp2_over_tensor_parallel(), 64))
    assert (found.problems, found.remarks) == ((), ("setup: 1 x broadcast over tp, but 0 on 4 ranks",))


def test_stages_cannot_run_alone() -> None:
    """Pipelines are refused, because a missing message would be read as tensor shapes."""
    scenario = Scenario(
        training=Training(model=Model(features=2, layers=(Layer(width=2),) * 2), data=Data(microbatches=(2,))),
        layout=Layout(mesh=Mesh(axes=(Axis(name="pp", size=2),)), parallelisms=(Pipeline(num_chunks=2),)),
    )
    with pytest.raises(UsageError, match=r"dry-run: pipelines are not supported: .* Expected a layout without a pipeline"):
        dry_run(scenario)


def test_where_nothing_is_predicted_another_number_of_calls_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without predictions, calls are only compared with the small world."""
    real = run._small_traffic
    monkeypatch.setattr(run, "_small_traffic", lambda small: real(small)[1:])
    monkeypatch.setattr(run, "predict_calls", lambda training, layout: Prediction(totals={}, reason="nobody can say"))
    found = dry_run(scenario_on_ranks(fsdp2_over_tensor_parallel(), 64))
    assert (found.problems, found.remarks) == (("setup: 1 x broadcast over tp, but 0 on 4 ranks",), ())


def test_a_layout_that_cannot_run_there_is_refused() -> None:
    """The layout's own reason explains why more tensor-parallel ranks than columns are refused."""
    with pytest.raises(UsageError, match=r"fsdp2 x tensor_parallel on 128 ranks .* multiple of the ranks"):
        dry_run(fsdp2_over_tensor_parallel(2, 64))


def test_calls_that_were_not_predicted_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """If calls can be predicted, their number and bytes must match at any size."""
    mesh = Mesh(axes=(Axis(name="dp", size=64),))
    sharded = Scenario(
        training=Training(model=Model(features=2, layers=(Layer(width=3),)), data=Data(microbatches=(64,))),
        layout=Layout(mesh=mesh, parallelisms=(FSDP2(),)),
    )
    found = dry_run(sharded)
    assert (found.problems, found.remarks, found.unmodelled) == ((), (), "")
    real = communication.totals
    monkeypatch.setattr(
        communication, "totals", lambda *given, **named: {key: (calls, 1) for key, (calls, _) in real(*given, **named).items()}
    )
    assert "rank 0, step 0 compute, all_gather over dp: 2 calls, 1 bytes, expected 2 calls, 48 bytes" in dry_run(sharded).problems
