"""Ranks share DTensor's shape and sharding results, in caches of limited size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds import dtensor_caches
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.dtensor import private as dtensor_private
from equivcheck.worlds.sim.dtensor.meta import UNKNOWN
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]

INFERS_SHAPES = "_propagate_tensor_meta_non_cached"
PROPAGATES = "propagate_op_sharding_non_cached"


@pytest.fixture(autouse=True)
def _all_shapes_from_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace every shape that is not shared with DTensor, so that requests can be counted."""
    monkeypatch.setattr(dtensor_private, "answer_on_meta", lambda _schema: UNKNOWN)


def add(rows: int, dtype: torch.dtype = torch.float64) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Add one to a distributed tensor; also return how many operations DTensor has propagated for this rank."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    total = distribute_tensor(torch.ones(rows, 3, dtype=dtype), mesh, [Shard(0)]) + 1
    return tuple(total.full_tensor().shape), total.dtype, dtensor_caches.num_propagations()


def watch(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Any]:
    """Operations for which ranks call a method of DTensor's propagator from now on."""
    seen: list[Any] = []
    original = getattr(ShardingPropagator, method)

    def watched(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, method, watched)
    return seen


@pytest.mark.parametrize(("method", "rows"), [(INFERS_SHAPES, 52), (PROPAGATES, 56)])
def test_answers_are_found_out_once(world: World, monkeypatch: pytest.MonkeyPatch, method: str, rows: int) -> None:
    """One rank computes shape and sharding, the others reuse them, and DTensor is restored after the run."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})  # what other tests have found out for other sizes
    seen = watch(monkeypatch, method)
    watching = getattr(ShardingPropagator, method)
    shapes = [value[:2] for value in world(4).run(add, rows).values]
    assert shapes == [((rows, 3), torch.float64)] * 4
    assert seen.count(torch.ops.aten.add.Tensor) == 1
    assert getattr(ShardingPropagator, method) is watching


def added_then_normed(rows: int) -> tuple[float, float]:
    """Norms of this rank's part of ones, with an order of its own: unchanged, and with its own number added."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    share, order = ((0.5, 1.0), (0.25, math.inf))[dist.get_rank()]
    values = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)])
    norms = [torch.linalg.vector_norm(each, order) for each in (values, torch.add(values, values, alpha=share))]
    return norms[0].to_local().item(), norms[1].to_local().item()


@pytest.mark.parametrize(("method", "rows"), [(INFERS_SHAPES, 48), (PROPAGATES, 60)])
def test_an_answer_serves_every_number_that_it_does_not_depend_on(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, rows: int
) -> None:
    """An added number does not count, as in DTensor's own key; the order of a norm decides how partial norms combine."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})  # what other tests have found out for other sizes
    seen = watch(monkeypatch, method)
    assert world(2).run(added_then_normed, rows).values == ((1.5 * rows, 2.25 * rows), (1.0, 1.25))
    assert seen.count(torch.ops.aten.add.Tensor) == 1
    assert seen.count(torch.ops.aten.linalg_vector_norm.default) == 2


def own_mesh() -> bool:
    """Whether the result of an operation has this rank's own mesh object."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    total = distribute_tensor(torch.ones(44, 3), mesh, [Shard(0)]) * 3
    return total.device_mesh is mesh and total._spec.mesh is mesh


def test_a_shared_answer_is_for_the_mesh_of_the_rank_that_takes_it(world: World) -> None:
    """Meshes of ranks are equal but not identical: each has its own process groups."""
    assert world(3).run(own_mesh).values == (True,) * 3


def product_with_spoiled_spec(rows: int) -> tuple[torch.Size, bool]:
    """Shape of a product in its spec, which the rank then spoils, and whether propagation has changed the argument's spec."""
    dtensor_caches.forget_shardings()  # a rank also keeps spoiled results itself
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    values = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)])
    before, product = values._spec.tensor_meta, values * 3
    shape = product._spec.tensor_meta.shape
    product._spec.tensor_meta = product._spec.tensor_meta._replace(shape=torch.Size((1,)))
    return shape, values._spec.tensor_meta != before


def test_a_rank_that_changes_its_result_leaves_those_of_others(world: World) -> None:
    """Before torch 2.10, select() changes the spec of its input, which an earlier operation may have shared with other ranks."""
    for _ in range(2):
        assert world(3).run(product_with_spoiled_spec, 62).values == ((torch.Size((62, 3)), False),) * 3


def test_propagation_that_changes_its_argument_is_done_by_each_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise only one rank would have the changed argument, and ranks would raise or communicate in different ways."""
    original = ShardingPropagator.propagate_op_sharding_non_cached

    def spoiling(propagator: Any, schema: Any) -> Any:
        found = original(propagator, schema)
        if schema.op is torch.ops.aten.mul.Tensor:
            schema.args_schema[0].tensor_meta = schema.args_schema[0].tensor_meta._replace(shape=torch.Size((1,)))
        return found

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", spoiling)
    assert [changed for _, changed in world(3).run(product_with_spoiled_spec, 64).values] == [True] * 3


def own_meshes() -> bool:
    """Whether results on tensors with two equal meshes have mesh objects of this rank."""
    meshes = [DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("dp",)) for _ in range(2)]
    tensors = [distribute_tensor(torch.ones(46, 3), mesh, [Shard(0)]) for mesh in meshes]
    totals = torch._foreach_add(tensors, tensors)
    return all(any(total._spec.mesh is mesh for mesh in meshes) for total in totals)


def test_an_answer_about_tensors_on_several_meshes_is_found_out_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers update lists of DTensors, and each may have its own mesh object."""
    seen = watch(monkeypatch, PROPAGATES)
    assert world(3).run(own_meshes).values == (True,) * 3
    assert seen.count(torch.ops.aten._foreach_add.List) == 1


def doubled_on(num_meshes: int) -> tuple[float, ...]:
    """Sums of two tensors doubled by a list operation, on one mesh object or on two."""
    dtensor_caches.forget_shardings()  # so that what ranks share is asked for
    meshes = [DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("dp",)) for _ in range(num_meshes)]
    tensors = [distribute_tensor(torch.ones(48, 3), meshes[index % num_meshes], [Shard(0)]) for index in range(2)]
    return tuple(float(total.full_tensor().sum()) for total in torch._foreach_add(tensors, tensors))


def test_answers_for_one_mesh_and_for_several_are_others(world: World) -> None:
    """A result for tensors on one mesh is not reused if equal tensors are on two."""
    for num_meshes in (1, 2, 1):
        assert world(2).run(doubled_on, num_meshes).values == ((288.0, 288.0),) * 2


def sizes_of_a_view(rows: int) -> tuple[int, ...]:
    """Local shape of an uneven tensor that was viewed with its full sizes."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    viewed = distribute_tensor(torch.ones(rows, 6), mesh, [Shard(0)]).view(rows, 2, 3)
    return tuple(viewed.to_local().shape)


def test_answers_that_depend_on_the_rank_are_not_shared(world: World) -> None:
    """Uneven shards have their own sizes, even if an operation is given the full sizes."""
    assert world(3).run(sizes_of_a_view, 7).values == ((3, 2, 3), (3, 2, 3), (1, 2, 3))


def test_other_types_and_sizes_are_other_answers(world: World) -> None:
    """A shared result depends on the sizes and types of the arguments."""
    for rows, dtype in ((60, torch.float64), (60, torch.float32), (64, torch.float32)):
        assert [value[:2] for value in world(2).run(add, rows, dtype).values] == [((rows, 3), dtype)] * 2


def test_what_a_rank_keeps_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank propagates an operation once, and again after its cache has exceeded the limit."""

    def num_worked_out() -> int:
        def program() -> int:
            before = dtensor_caches.num_propagations()
            return add(20)[2] - before

        return world(2).run(program).values[0]

    num_worked_out()
    assert (num_worked_out() == 0) != is_torch_in(dtensor_caches.REMEMBERS_ROWS_OF_EMBEDDINGS)  # then each run starts anew
    monkeypatch.setattr(dtensor_caches, "MAX_SHARDINGS", -1)
    num_worked_out()
    assert num_worked_out() > 0


def test_what_ranks_share_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared results and traces are dropped beyond the limit, however many shapes occur."""
    monkeypatch.setattr(dtensor_private, "MAX_SHARED", 8)
    for rows in range(70, 90):
        world(2).run(add, rows)
    assert len(dtensor_private._shapes) <= 8
    assert len(dtensor_private._shardings) <= 8
    assert len(FakeTensorMode.cache) < 60


def test_in_some_runs_ranks_share_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule seed decides: each rank then computes everything itself, whatever was shared before."""
    seen = watch(monkeypatch, PROPAGATES)
    unshared = next(seed for seed in range(1_000) if dtensor_private.is_unshared(seed))
    assert not dtensor_private.is_unshared(0)
    for seed, times in ((0, 1), (unshared, 4)):
        seen.clear()
        assert [value[:2] for value in world(4).run(add, 68, schedule_seed=seed).values] == [((68, 3), torch.float64)] * 4
        assert seen.count(torch.ops.aten.add.Tensor) == times


def test_an_elementwise_operation_is_traced_for_one_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result shapes for other sizes follow from one trace."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})
    seen = watch(monkeypatch, INFERS_SHAPES)
    for rows in (172, 176):
        assert [value[:2] for value in world(2).run(add, rows).values] == [((rows, 3), torch.float64)] * 2
    assert seen.count(torch.ops.aten.add.Tensor) == 1


def test_ranks_redistribute_strided_shards_in_the_same_way() -> None:
    """DTensor's search depends on earlier placements, so one rank must not search for all."""
    leaves = (
        Leaf(shape=(2, 3, 4), placements=("S(0)", "S(1)")),
        Leaf(shape=(5, 4), placements=("S(0)", "P(sum)"), seed=1),
        Leaf(shape=(5,), placements=("R", "R"), seed=2),
    )
    program = TensorProgram(mesh=(2, 2), statements=(*leaves, Operation(name="linear_bias", arguments=(3, 2, 1))))
    assert check_program(program).outcome in {Outcome.EQUIVALENT, Outcome.KNOWN}
