"""Ranks share what DTensor finds out about shapes, and keep a bounded amount of it."""

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
from equivcheck.worlds import dtensor_caches
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim import dtensor_private
from equivcheck.worlds.sim.dtensor_meta import UNKNOWN
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]

METHOD = "_propagate_tensor_meta_non_cached"


@pytest.fixture(autouse=True)
def _all_shapes_from_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape that is not shared is asked of DTensor, so that questions can be counted."""
    monkeypatch.setattr(dtensor_private, "answer_on_meta", lambda _schema: UNKNOWN)


def add(rows: int, dtype: torch.dtype = torch.float64) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Add one to a distributed tensor; also how many operations DTensor has worked out for this rank."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    total = distribute_tensor(torch.ones(rows, 3, dtype=dtype), mesh, [Shard(0)]) + 1
    return tuple(total.full_tensor().shape), total.dtype, dtensor_caches.num_propagations()


@pytest.mark.parametrize(("method", "rows"), [(METHOD, 52), ("propagate_op_sharding_non_cached", 56)])
def test_answers_are_found_out_once(world: World, monkeypatch: pytest.MonkeyPatch, method: str, rows: int) -> None:
    """One rank works out shape and sharding, the others take its answer, and DTensor is as before after the run."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})  # what other tests have found out for other sizes
    seen: list[Any] = []
    original = getattr(ShardingPropagator, method)

    def counting(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, method, counting)
    shapes = [value[:2] for value in world(4).run(add, rows).values]
    assert shapes == [((rows, 3), torch.float64)] * 4
    assert seen.count(torch.ops.aten.add.Tensor) == 1
    assert getattr(ShardingPropagator, method) is counting


def added_then_normed(rows: int) -> tuple[float, float]:
    """Norms of what this rank has of ones, in an order of its own: as they are, and with a share of its own added."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    share, order = ((0.5, 1.0), (0.25, math.inf))[dist.get_rank()]
    values = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)])
    norms = [torch.linalg.vector_norm(each, order) for each in (values, torch.add(values, values, alpha=share))]
    return norms[0].to_local().item(), norms[1].to_local().item()


@pytest.mark.parametrize(("method", "rows"), [(METHOD, 48), ("propagate_op_sharding_non_cached", 60)])
def test_an_answer_serves_every_number_that_it_does_not_depend_on(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, rows: int
) -> None:
    """A share that is added does not count, as in DTensor's own key; the order of a norm decides how norms of parts add up."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})  # what other tests have found out for other sizes
    seen: list[Any] = []
    original = getattr(ShardingPropagator, method)

    def counting(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, method, counting)
    assert world(2).run(added_then_normed, rows).values == ((1.5 * rows, 2.25 * rows), (1.0, 1.25))
    assert seen.count(torch.ops.aten.add.Tensor) == 1
    assert seen.count(torch.ops.aten.linalg_vector_norm.default) == 2


def own_mesh() -> bool:
    """Whether the result of an operation lies on this rank's own mesh object."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    total = distribute_tensor(torch.ones(44, 3), mesh, [Shard(0)]) * 3
    return total.device_mesh is mesh and total._spec.mesh is mesh


def test_a_shared_answer_is_for_the_mesh_of_the_rank_that_takes_it(world: World) -> None:
    """Meshes of ranks are equal but not the same: each has process groups of its own."""
    assert world(3).run(own_mesh).values == (True,) * 3


def own_meshes() -> bool:
    """Whether the results of an operation on tensors of two equal meshes lie on mesh objects of this rank."""
    meshes = [DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("dp",)) for _ in range(2)]
    tensors = [distribute_tensor(torch.ones(46, 3), mesh, [Shard(0)]) for mesh in meshes]
    totals = torch._foreach_add(tensors, tensors)
    return all(any(total._spec.mesh is mesh for mesh in meshes) for total in totals)


def test_an_answer_about_tensors_on_several_meshes_is_found_out_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers update lists of DTensors, each of which may have a mesh object of its own."""
    seen: list[Any] = []
    original = ShardingPropagator.propagate_op_sharding_non_cached

    def counting(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", counting)
    assert world(3).run(own_meshes).values == (True,) * 3
    assert seen.count(torch.ops.aten._foreach_add.List) == 1


def doubled_on(num_meshes: int) -> tuple[float, ...]:
    """Sums of two tensors that an operation on a list has doubled, which lie on one mesh object or on two."""
    dtensor_caches.forget_shardings()  # so that what ranks share is asked for
    meshes = [DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("dp",)) for _ in range(num_meshes)]
    tensors = [distribute_tensor(torch.ones(48, 3), meshes[index % num_meshes], [Shard(0)]) for index in range(2)]
    return tuple(float(total.full_tensor().sum()) for total in torch._foreach_add(tensors, tensors))


def test_answers_for_one_mesh_and_for_several_are_others(world: World) -> None:
    """What was found out of tensors of one mesh is not taken where equal tensors lie on two."""
    for num_meshes in (1, 2, 1):
        assert world(2).run(doubled_on, num_meshes).values == ((288.0, 288.0),) * 2


def sizes_of_a_view(rows: int) -> tuple[int, ...]:
    """The local shape of an uneven tensor that was viewed with its full sizes."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    viewed = distribute_tensor(torch.ones(rows, 6), mesh, [Shard(0)]).view(rows, 2, 3)
    return tuple(viewed.to_local().shape)


def test_answers_that_depend_on_the_rank_are_not_shared(world: World) -> None:
    """Uneven parts have sizes of their own, also where an operation is given the sizes of the whole."""
    assert world(3).run(sizes_of_a_view, 7).values == ((3, 2, 3), (3, 2, 3), (1, 2, 3))


def test_other_types_and_sizes_are_other_answers(world: World) -> None:
    """What is shared depends on the sizes and types of the arguments."""
    for rows, dtype in ((60, torch.float64), (60, torch.float32), (64, torch.float32)):
        assert [value[:2] for value in world(2).run(add, rows, dtype).values] == [((rows, 3), dtype)] * 2


def test_what_a_rank_keeps_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank works an operation out once, and anew when it has kept more than the bound."""

    def num_worked_out() -> int:
        def program() -> int:
            before = dtensor_caches.num_propagations()
            return add(20)[2] - before

        return world(2).run(program).values[0]

    num_worked_out()
    assert num_worked_out() == 0
    monkeypatch.setattr(dtensor_caches, "MAX_SHARDINGS", -1)
    num_worked_out()
    assert num_worked_out() > 0


def test_what_ranks_share_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes come by, answers and traces are dropped when there are more than the bound."""
    monkeypatch.setattr(dtensor_private, "MAX_SHARED", 8)
    for rows in range(70, 90):
        world(2).run(add, rows)
    assert len(dtensor_private._shapes) <= 8
    assert len(dtensor_private._shardings) <= 8
    assert len(FakeTensorMode.cache) < 60


def test_in_some_runs_ranks_share_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed of the order says so: each rank then works out all that it needs, whatever it was told before."""
    seen: list[Any] = []
    original = ShardingPropagator.propagate_op_sharding_non_cached

    def counting(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", counting)
    unshared = next(seed for seed in range(1_000) if dtensor_private.is_unshared(seed))
    assert not dtensor_private.is_unshared(0)
    for seed, times in ((0, 1), (unshared, 4)):
        seen.clear()
        assert [value[:2] for value in world(4).run(add, 68, schedule_seed=seed).values] == [((68, 3), torch.float64)] * 4
        assert seen.count(torch.ops.aten.add.Tensor) == times


def test_an_elementwise_operation_is_traced_for_one_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of other sizes have results whose shapes follow."""
    monkeypatch.setattr(dtensor_private, "_patterns", {})
    seen: list[Any] = []
    original = getattr(ShardingPropagator, METHOD)

    def counting(propagator: Any, schema: Any) -> Any:
        seen.append(schema.op)
        return original(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, METHOD, counting)
    for rows in (172, 176):
        assert [value[:2] for value in world(2).run(add, rows).values] == [((rows, 3), torch.float64)] * 2
    assert seen.count(torch.ops.aten.add.Tensor) == 1


def test_ranks_redistribute_strided_shards_in_the_same_way() -> None:
    """DTensor finds other ways after it has weighed placements: one rank that weighs them for all would go a way of its own."""
    leaves = (
        Leaf(shape=(2, 3, 4), placements=("S(0)", "S(1)")),
        Leaf(shape=(5, 4), placements=("S(0)", "P(sum)"), seed=1),
        Leaf(shape=(5,), placements=("R", "R"), seed=2),
    )
    program = TensorProgram(mesh=(2, 2), statements=(*leaves, Operation(name="linear_bias", arguments=(3, 2, 1))))
    assert check_program(program).outcome in {Outcome.EQUIVALENT, Outcome.KNOWN}
