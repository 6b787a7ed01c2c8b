"""Replacements for torch parts impossible on rank threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

from equivcheck.worlds.failure import FailureKind, RanksFailed
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def times_rank(tensor: torch.Tensor) -> torch.Tensor:
    """A result that no guard of the compiler distinguishes by rank."""
    return tensor * (1 + dist.get_rank())


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """A result independent of the rank."""
    return tensor + 1


def compiled(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compiled with the cheapest compiler."""
    found: Callable[[torch.Tensor], torch.Tensor] = torch.compile(function, backend="eager")
    return found


def test_compiled_functions_are_refused(world: World) -> None:
    """A rank that calls a compiled function gets an error: otherwise the second rank would get the first rank's result."""

    def program(function: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
        return function()(torch.ones(2))

    before = compiled(plus_one)
    assert before(torch.ones(2)).tolist() == [2, 2]
    for function in (lambda: compiled(times_rank), lambda: before):
        with pytest.raises(RanksFailed, match=r"rank 0 raised .*CallRefused: torch.compile: .* Run over gloo"):
            world(2).run(program, function)
    assert before(torch.ones(3)).tolist() == [2, 2, 2]


def test_what_compiles_nothing_runs(world: World) -> None:
    """Functions skipped by the compiler run, and so do compiled ones with compiling disabled."""

    def program() -> list[float]:
        with torch.compiler.set_stance("force_eager"):
            eager = compiled(times_rank)(torch.ones(1))
        return [eager.item(), torch.compiler.disable(times_rank)(torch.ones(1)).item()]

    assert world(2).run(program).values == ([1, 1], [2, 2])


def profiled() -> int:
    """Number of calls in a rank's own profile."""
    with torch.profiler.profile() as found:
        dist.all_reduce(torch.ones(2) + 1)
    return sum(event.name == "aten::add" for event in found.events())


def test_ranks_profile_one_at_a_time(world: World) -> None:
    """One rank records itself; a second profiler meanwhile is refused, also next to the process's own."""

    def program(profile_of: Callable[[int], bool]) -> int:
        if profile_of(dist.get_rank()):
            return profiled()
        dist.all_reduce(torch.ones(2))
        return 0

    for only in (0, 1, 0):
        assert world(2).run(program, lambda rank, only=only: rank == only).values[only] == 1
    with pytest.raises(
        RanksFailed, match=r"rank 1 raised .*CallRefused: torch's profiler: a second simulated rank is not supported"
    ):
        world(2).run(program, lambda _: True)
    with profiler.profile(), pytest.raises(RanksFailed, match=r"rank 0 raised .*CallRefused: torch's profiler: a second"):
        world(2).run(program, lambda _: True)
    assert world(2).run(program, lambda rank: rank == 1).values == (0, 1)


def test_a_profiler_ends_with_its_run(world: World) -> None:
    """A profiler left running does not affect the next run."""

    def program() -> None:
        if dist.get_rank() == 0:
            profiler.profile().__enter__()

    world(2).run(program)
    with profiler.profile() as own:
        torch.ones(2)
    assert own.function_events
    assert world(2).run(lambda: profiled() if dist.get_rank() else dist.all_reduce(torch.ones(2))).values[1] == 1


def test_a_future_of_another_is_waited_for(world: World) -> None:
    """A rank that waits for a future derived in C++ lets the others run."""

    def program() -> list[list[float]]:
        def hook(state: Any, bucket: Any) -> Any:
            future = state[0]().reducer._run_allreduce_hook(bucket)
            future.wait()
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer() / dist.get_world_size())
            return done

        import weakref

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        model.register_comm_hook([weakref.ref(model)], hook)
        model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        return model.module.weight.grad.tolist()

    assert world(2).run(program).values == ([[0.5]], [[0.5]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.group.WORLD.split_group([0, 1]), "split_group: splitting a simulated group is not supported"),
        (
            lambda: dist.group.WORLD.merge_remote_group(dist.HashStore(), 2),
            "merge_remote_group: merging simulated groups is not supported",
        ),
        (lambda: dist.gather(torch.ones(4), [torch.ones(2, 2)] * 2 if not dist.get_rank() else None), "gather: outputs torch"),
        (lambda: dist.scatter(torch.ones(4), [torch.ones(2, 2)] * 2 if not dist.get_rank() else None), "scatter: inputs torch"),
    ],
)
def test_what_would_end_the_process_or_hang_is_refused(world: World, call: Callable[[], Any], text: str) -> None:
    """Calls that look for a backend inside the group, and calls that only the root refuses over gloo while others wait."""
    with pytest.raises(RanksFailed, match=f"rank 0 raised equivcheck.worlds.sim.refusals.CallRefused: {text}"):
        world(2).run(call)


def test_a_key_that_nobody_sets_is_a_deadlock(world: World) -> None:
    """The deadlock is detected at once, and the error names the key."""

    def program() -> None:
        if dist.get_rank() == 0:
            dist.group.WORLD.get_group_store().get("nobody's")

    with pytest.raises(
        RanksFailed, match=r"no rank can continue: rank 0 waits in store.get of nobody's .*; rank 1 finished"
    ) as caught:
        world(2).run(program)
    assert caught.value.failure.kind is FailureKind.DEADLOCK
