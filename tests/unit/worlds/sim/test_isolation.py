"""The simulated world leaves nothing behind, and ranks share no relevant state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def torch_globals() -> dict[str, Any]:
    """All process-wide state within a run's reach."""
    return {
        "world": c10d._world,
        "backend": c10d._backend,
        "init_method": c10d._default_pg_init_method,
        "hook": sys.excepthook,
        "backends": list(dist.Backend.backend_list),
        "attributes": sorted(vars(dist.Backend)),
        "plugins": sorted(dist.Backend._plugins),
        "capability": dict(dist.Backend.backend_capability),
        "devices": dict(dist.Backend.default_device_backend_map),
        "types": sorted(dist.Backend.backend_type_map),
        "num_threads": torch.get_num_threads(),
        "new_thread_num_threads": in_new_thread(torch.get_num_threads),
        "autograd": torch._C._is_multithreading_enabled(),
        "initialized": dist.is_initialized(),
        "dtype": torch.get_default_dtype(),
    }


def in_new_thread(function: Callable[[], Any]) -> Any:
    """Result of a function in a new thread."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(function()))
    thread.start()
    thread.join()
    return values[0]


def test_torch_is_as_before() -> None:
    """After a successful run, a failed run and close, every global is restored and the threads are gone."""

    def half() -> None:
        if dist.get_rank():
            dist.barrier()

    before, threads = torch_globals(), set(threading.enumerate())
    with SimRanks(2) as ranks:
        ranks.run(dist.barrier)
        assert torch_globals() == before
        with pytest.raises(RanksFailed):
            ranks.run(half)
        assert torch_globals() == before
    assert torch_globals() == before
    assert set(threading.enumerate()) == threads
    ranks.close()


def test_closed_ranks_start_anew() -> None:
    """Closing twice is allowed, and closed ranks start again when they run."""
    ranks = SimRanks(2)
    ranks.close()
    for _ in range(2):
        assert ranks.run(dist.get_rank).values == (0, 1)
        ranks.close()


def test_own_process_group_is_untouched(world: World) -> None:
    """The caller's own process group works before, between and after runs, and ranks do not see it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert world(2).run(dist.get_world_size).values == (2, 2)
        assert dist.group.WORLD is group
        assert dist.get_backend() == "gloo"
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        functional = dist._functional_collectives.all_reduce(tensor, "sum", group)
        assert (functional + 1).item() == 2
        assert c10d._resolve_process_group(group.group_name) is not None
    finally:
        dist.destroy_process_group()
    assert world(2).run(dist.get_world_size).values == (2, 2)


def test_another_thread_keeps_its_own_world(world: World) -> None:
    """While ranks run, another thread sees the caller's `torch.distributed`."""

    def program() -> int:
        return int(in_new_thread(dist.get_world_size))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert world(2).run(program).values == (1, 1)
    finally:
        dist.destroy_process_group()


def draws() -> tuple[list[float], list[float]]:
    """Random numbers before and after the baton has passed."""
    before = torch.rand(3).tolist()
    dist.barrier()
    return before, torch.rand(3).tolist()


def test_each_rank_has_its_own_random_state(world: World) -> None:
    """Draws depend only on the rank, not on the schedule, other ranks' draws or the caller's state."""
    torch.manual_seed(1)
    first = world(3).run(draws).values
    torch.manual_seed(2)
    for seed in range(1, 6):
        assert world(3).run(draws, schedule_seed=seed).values == first
    assert world(2).run(draws).values == first[:2]
    assert len({tuple(after) for _, after in first} | {tuple(before) for before, _ in first}) == 6


def test_seeding_in_a_rank_is_its_own(world: World) -> None:
    """Ranks that set one seed draw the same numbers, as processes do."""

    def program() -> tuple[list[float], list[float]]:
        torch.manual_seed(7)
        return draws()

    values = world(3).run(program).values
    assert values[0] == values[1] == values[2]


def test_callers_random_state_is_untouched(world: World) -> None:
    """A run, successful or not, does not advance the caller's generator."""

    def program(fail: bool) -> None:
        torch.manual_seed(dist.get_rank())
        torch.rand(5)
        if fail:
            raise ValueError

    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    world(2).run(program, False)
    with pytest.raises(RanksFailed):
        world(2).run(program, True)
    assert torch.rand(4).tolist() == expected


def test_schedule_seed_orders_the_ranks(world: World) -> None:
    """Seed 0 runs ranks in order; another seed gives another order, always the same one."""
    order: list[int] = []

    def program() -> None:
        for _ in range(4):
            order.append(dist.get_rank())
            dist.barrier()

    def order_of(seed: int) -> tuple[int, ...]:
        order.clear()
        world(3).run(program, schedule_seed=seed)
        return tuple(order)

    assert order_of(0)[:3] == (0, 1, 2)
    orders = [order_of(seed) for seed in range(6)]
    assert orders == [order_of(seed) for seed in range(6)]
    assert len(set(orders)) > 3


def test_ranks_compute_with_one_thread(world: World) -> None:
    """Ranks use one thread for an operation, so sums do not depend on the machine."""
    assert world(2).run(torch.get_num_threads).values == (1, 1)


def test_calls_are_recorded(world: World) -> None:
    """Each rank's calls are recorded in the order of issue, numbered within their group."""

    def program() -> None:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2, 3, dtype=torch.float64))
        if dist.get_rank() < 2:
            dist.broadcast(torch.ones(4, dtype=torch.int32), src=1, group=pair)
        dist.barrier()

    calls = world(3).run(program).calls
    assert [call.describe() for call in calls[0]] == [
        "all_reduce.sum float64[2, 3] on ranks (0, 1, 2), call 0",
        "broadcast with rank 1 int32[4] on ranks (0, 1), call 0",
        "barrier on ranks (0, 1, 2), call 1",
    ]
    assert [call.num_bytes for call in calls[0]] == [48, 16, 0]
    assert [call.op for call in calls[2]] == ["all_reduce.sum", "barrier"]
