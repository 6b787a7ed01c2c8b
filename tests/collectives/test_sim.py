"""What the simulated world does beyond what every world must: records, order, withheld results, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def values_of(rank: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The float64 input of a rank: the same in every process and thread."""
    return torch.tensor(np.random.default_rng([seed, rank]).standard_normal(shape), dtype=torch.float64)


def stacked(size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Everybody's input."""
    return np.stack([values_of(rank, shape).numpy() for rank in range(size)])


def assert_all(results: tuple[Any, ...], expected: np.ndarray | list[Any]) -> None:
    """Every rank has the expected value."""
    for result in results:
        np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-15, atol=0)


def test_reductions_run_in_rank_order(world: World) -> None:
    """A sum is folded from rank 0 upwards, whatever the schedule."""
    inputs = [1e16, 1.0, -1e16, 1.0]

    def program() -> float:
        tensor = torch.tensor([inputs[dist.get_rank()]], dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.item()

    expected = ((1e16 + 1.0) - 1e16) + 1.0
    for seed in range(4):
        run = world(4).run(program, schedule_seed=seed)
        assert run.values == (expected,) * 4
        assert [call.op for call in run.calls[0]] == ["all_reduce.sum"]


@pytest.mark.parametrize("root", [0, 2])
def test_rooted(world: World, root: int) -> None:
    """Broadcast, reduce, gather and scatter go from or to the root, and leave other ranks' inputs alone."""

    def program() -> dict[str, Any]:
        rank = dist.get_rank()
        sent, reduced = values_of(rank, (2, 2)), values_of(rank, (2, 2))
        dist.broadcast(sent, src=root)
        dist.reduce(reduced, dst=root)
        gathered = [torch.zeros(2, 2, dtype=torch.float64) for _ in range(3)] if rank == root else None
        dist.gather(values_of(rank, (2, 2)), gathered, dst=root)
        scattered = torch.zeros(2, 2, dtype=torch.float64)
        dist.scatter(scattered, list(values_of(rank, (6, 2)).chunk(3)) if rank == root else None, src=root)
        return {"sent": sent, "reduced": reduced, "gathered": gathered, "scattered": scattered}

    run = world(3).run(program)
    inputs = stacked(3, (2, 2))
    for rank, values in enumerate(run.values):
        np.testing.assert_array_equal(values["sent"], inputs[root])
        np.testing.assert_allclose(values["reduced"], inputs.sum(0) if rank == root else inputs[rank], rtol=1e-15)
        np.testing.assert_array_equal(values["scattered"], values_of(root, (6, 2))[2 * rank : 2 * rank + 2])
    np.testing.assert_array_equal(torch.stack(run.values[root]["gathered"]), inputs)
    assert [call.peer for call in run.calls[0]] == [root] * 4


def test_coalesced(world: World) -> None:
    """Coalesced calls give what single calls give, with one entry in the record."""

    def program() -> tuple[np.ndarray, ...]:
        rank = dist.get_rank()
        first, second = values_of(rank, (2,)), values_of(rank, (3,))
        with dist._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)
        gathered = [torch.zeros(4, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)]
        with dist._coalescing_manager(async_ops=True) as handle:
            all_gather_single(gathered[0], values_of(rank, (2,)))
            all_gather_single(gathered[1], values_of(rank, (3,)))
        handle.wait()
        return first.numpy(), second.numpy(), gathered[0].numpy(), gathered[1].numpy()

    run = world(2).run(program)
    for first, second, *gathered in run.values:
        assert_all((first,), stacked(2, (2,)).sum(0))
        assert_all((second,), stacked(2, (3,)).sum(0))
        assert_all((gathered[0],), stacked(2, (2,)).reshape(-1))
        assert_all((gathered[1],), stacked(2, (3,)).reshape(-1))
    assert [call.op for call in run.calls[0]] == ["all_reduce.sum", "all_gather"]


def test_messages(world: World) -> None:
    """Messages between two ranks keep their order and are told apart by tag."""

    def program() -> list[float]:
        rank, got = dist.get_rank(), torch.zeros(3)
        if rank == 0:
            works = [dist.isend(torch.tensor([value]), 1, tag=tag) for value, tag in ((1.0, 0), (2.0, 0), (3.0, 5))]
            for work in works:
                work.wait()
        else:
            dist.recv(got[2:], 0, tag=5)
            dist.recv(got[:1], 0)
            dist.recv(got[1:2], 0)
        return got.tolist()

    run = world(2).run(program)
    assert run.values[1] == [1.0, 2.0, 3.0]
    assert [(call.op, call.peer) for call in run.calls[1]] == [("recv", 0)] * 3


def test_blocking_messages_in_a_ring(world: World) -> None:
    """A batch of sends and receives goes around a ring without deadlock."""

    def program() -> float:
        rank, size, got = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        ops = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got.item()

    assert world(3).run(program).values == (2.0, 0.0, 1.0)


def test_receive_from_anybody(world: World) -> None:
    """A receive without a source takes what comes and says from whom, the same way each time."""

    def program() -> list[tuple[int, float]]:
        rank = dist.get_rank()
        if rank:
            dist.send(torch.tensor([float(rank)]), 0)
            return []
        got = []
        for _ in range(2):
            tensor = torch.zeros(1)
            got.append((dist.recv(tensor), tensor.item()))
        return got

    orders = [world(3).run(program, schedule_seed=seed).values[0] for seed in range(1, 9) for _ in range(2)]
    assert all(sorted(order) == [(1, 1.0), (2, 2.0)] for order in orders)
    assert orders[::2] == orders[1::2]
    assert len({tuple(order) for order in orders}) == 2


def test_a_blocking_send_waits_for_its_receiver(world: World) -> None:
    """Two ranks that both send first, blocking, wait for each other in vain."""

    def program() -> None:
        peer, tensor = 1 - dist.get_rank(), torch.zeros(1)
        dist.send(tensor, peer)
        dist.recv(tensor, peer)

    with pytest.raises(RanksFailed, match=r"no rank can continue: rank 0 waits in send with rank 1 float32\[1\]"):
        world(2).run(program)


def test_groups_and_meshes(world: World) -> None:
    """Subgroups and the axes of 2-D and 3-D meshes reduce among their own members."""

    def program() -> tuple[float, list[float], list[float]]:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        mine = groups[0] if rank in (0, 3) else groups[1]
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=mine)
        sums = []
        for shape, names in (((2, 2), ("dp", "tp")), ((2, 1, 2), ("pp", "dp", "tp"))):
            mesh = device_mesh(shape, names)
            for name in names:
                part = torch.tensor(float(rank))
                dist.all_reduce(part, group=mesh.get_group(name))
                sums.append(part.item())
        return tensor.item(), sums[:2], sums[2:]

    for _ in range(2):
        values = world(4).run(program).values
        assert [value[0] for value in values] == [3.0, 3.0, 3.0, 3.0]
        assert [value[1] for value in values] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
        assert [value[2] for value in values] == [[2.0, 0.0, 1.0], [4.0, 1.0, 1.0], [2.0, 2.0, 5.0], [4.0, 3.0, 5.0]]


def test_functional_collectives(world: World) -> None:
    """Functional collectives give an asynchronous tensor whose use waits."""

    def program() -> tuple[list[float], list[float], list[float], list[float]]:
        from torch.distributed import _functional_collectives as functional

        rank, group = dist.get_rank(), dist.group.WORLD
        tensor = torch.arange(2.0) + rank
        reduced = functional.all_reduce(tensor, "sum", group)
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        gathered, scattered = gather(tensor, 0, group), scatter(tensor, "sum", 0, group)
        swapped = functional.all_to_all_single(tensor, None, None, group)
        return (reduced + 0).tolist(), (gathered + 0).tolist(), (scattered + 0).tolist(), (swapped + 0).tolist()

    assert world(2).run(program).values == (
        ([1.0, 3.0], [0.0, 1.0, 1.0, 2.0], [1.0], [0.0, 1.0]),
        ([1.0, 3.0], [0.0, 1.0, 1.0, 2.0], [3.0], [1.0, 2.0]),
    )


def test_results_are_withheld_until_waited_for(world: World) -> None:
    """Between issue and wait an output is NaN or a sentinel, and the input may change without consequence."""

    def program() -> tuple[bool, bool, list[float], list[int]]:
        tensor, source = torch.ones(2), torch.ones(2, dtype=torch.int64)
        gathered = torch.zeros(4, dtype=torch.int64)
        works = [dist.all_reduce(tensor, async_op=True), all_gather_single(gathered, source, async_op=True)]
        hidden = bool(tensor.isnan().all()), bool((gathered == 0x5A5A5A5A5A5A5A5A).all())
        source.fill_(99)
        for work in works:
            work.wait()
        return *hidden, tensor.tolist(), gathered.tolist()

    assert world(2).run(program).values == ((True, True, [2.0, 2.0], [1, 1, 1, 1]),) * 2


def test_polling_lets_others_run(world: World) -> None:
    """A rank that polls a handle gets its result in the end, and polling in vain is a deadlock."""

    def program(skip: bool) -> float:
        tensor = torch.ones(1)
        if skip and dist.get_rank():
            return 0.0
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        return tensor.item()

    assert world(2).run(program, False).values == (2.0, 2.0)
    with pytest.raises(RanksFailed, match="no rank can continue: rank 0 waits in all_reduce"):
        world(2).run(program, True)


def test_fake_tensors_outlive_the_world_that_made_the_first() -> None:
    """What they share in the process is not freed with the rank thread that made one; in torch 2.10 the next one would crash."""

    def program() -> list[int]:
        with FakeTensorMode():
            return list(torch.empty(2, 3).shape)

    for _ in range(2):
        ranks = SimRanks(2)
        assert ranks.run(program).values == ([2, 3],) * 2
        ranks.close()


def test_futures_hold_the_result(world: World) -> None:
    """`get_future` outside a backward pass is a wait, and continuations see the value."""

    def program() -> float:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        return future.then(lambda done: done.value()[0].item() * 10).wait()

    assert world(2).run(program).values == (20.0, 20.0)


def test_a_size_that_does_not_fit_is_an_error_of_its_rank(world: World) -> None:
    """An output of the wrong size raises where it was passed."""

    def program() -> None:
        all_gather_single(torch.zeros(5), torch.zeros(2))

    with pytest.raises(RanksFailed, match=r"rank 0 raised .*CallRefused: all_gather: part torch.float32 \[2\]"):
        world(2).run(program)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.isend(torch.ones(1), dist.get_rank()), r"send: rank 0 is not valid: it is the caller itself"),
        (lambda: dist.irecv(torch.ones(1), dist.get_rank()), r"recv: rank 0 is not valid: it is the caller itself"),
        (lambda: dist.isend(torch.ones(2, 3).t(), 1), r"send: torch.float32 \[3, 2\] is not valid: it is not contiguous"),
        (
            lambda: dist.all_to_all_single(torch.ones(2, 2), torch.ones(2, 2).t()),
            r"all_to_all: .* is not contiguous",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(8), torch.ones(1, 8)),
            r"all_to_all: shape \[1, 8\] is not valid without split sizes. Expected a multiple of 2",
        ),
        (
            lambda: dist.group.WORLD.allreduce([torch.ones(1)]).result(),
            r"result of all_reduce.sum is not valid before wait",
        ),
        (
            lambda: dist.broadcast(torch.ones(1), src=7),
            r"broadcast: root 7 is not valid: it is not a member. Expected a rank within the group, 0 to 1",
        ),
        (
            lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)),
            r"all_reduce.sum: torch.int16 is not supported: gloo transfers only",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4), op=dist._make_nccl_premul_sum(0.5)),
            r"all_reduce.premul_sum: torch.float32 is not supported: gloo has no premultiplied sum",
        ),
        (lambda: dist.new_group(backend="mpi"), r"backend 'mpi' is not valid in a simulated world. Expected 'gloo'"),
    ],
)
def test_what_gloo_refuses_is_refused(world: World, call: Callable[[], Any], text: str) -> None:
    """A call that gloo does not take is an error of the rank that issues it."""
    with pytest.raises(RanksFailed, match=f"rank 0 raised equivcheck.worlds.sim.refusals.CallRefused: {text}"):
        world(2).run(call)


def test_a_fake_group_is_torchs_own(world: World) -> None:
    """Programs make them for axes of a mesh that they do not use: what is called on one does nothing, as beside gloo."""

    def program() -> tuple[float, float]:
        fake, own = dist.new_group(backend="fake"), torch.full((), float(dist.get_rank()))
        everybody = own.clone()
        dist.all_reduce(own, group=fake)
        dist.all_reduce(everybody)
        return float(own), float(everybody)

    assert world(2).run(program).values == ((0.0, 1.0), (1.0, 1.0))


def test_a_monitored_barrier_names_who_is_missing(world: World) -> None:
    """Ranks that wait at one for a rank that never comes are a deadlock, known at once; torch's own is put back afterwards."""
    theirs = dist.monitored_barrier

    def program() -> None:
        if dist.get_rank() != 1:
            dist.monitored_barrier()

    with pytest.raises(RanksFailed, match=r"rank 0 waits in monitored_barrier on ranks .* rank 1 finished"):
        world(3).run(program)
    assert dist.monitored_barrier is theirs


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_extrema_propagate_nan(world: World, op: str) -> None:
    """NaN wins, as in `torch.minimum` and `torch.maximum`, whichever rank has it."""

    def program() -> list[float]:
        tensor = torch.tensor([float("nan") if dist.get_rank() == place else 1.0 for place in range(3)])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return tensor.isnan().tolist()

    assert world(3).run(program).values == ([True] * 3,) * 3
