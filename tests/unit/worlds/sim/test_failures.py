"""Failures in the simulated world, and that it works again afterwards."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.failure import Failure, FailureKind, RanksDidNotStart, RanksFailed, RankState
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.sim.ranks import SimRanks

World = Callable[[int], SimRanks]


def total() -> float:
    """A program that finishes: the sum of the ranks, over a mesh."""
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor, group=device_mesh((dist.get_world_size(),), ("dp",)).get_group())
    return tensor.item()


def failure_of(ranks: SimRanks, program: Callable[..., Any], **options: Any) -> Failure:
    """Run a program that fails, check that the world works again, and return the failure."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(program, **options)
    assert ranks.run(total).values == (sum(range(ranks.size)),) * ranks.size
    return caught.value.failure


def states(failure: Failure) -> list[RankState]:
    """Every rank's state."""
    return [report.state for report in failure.reports]


def test_rank_that_skips_a_collective(world: World) -> None:
    """If others wait for a rank that finished, it is a deadlock, with the pending call and the program's stack."""

    def program() -> None:
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(3, 4, dtype=torch.float64))

    failure = failure_of(world(3), program)
    assert failure.kind is FailureKind.DEADLOCK
    assert failure.hung
    assert states(failure) == [RankState.WAITING, RankState.FINISHED, RankState.WAITING]
    assert failure.reports[0].pending == "all_reduce.sum float64[3, 4] on ranks (0, 1, 2), call 0"
    assert "dist.all_reduce(torch.ones(3, 4" in failure.reports[0].stack
    assert "rank 1 finished" in failure.summary
    assert "\n" not in failure.summary


def test_ranks_that_wait_for_each_other(world: World) -> None:
    """Two groups entered in opposite orders are a deadlock."""

    def program() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups if dist.get_rank() else groups[::-1]:
            dist.barrier(group)

    failure = failure_of(world(2), program)
    assert failure.kind is FailureKind.DEADLOCK
    assert [report.pending for report in failure.reports] == ["barrier on ranks (0, 1), call 0"] * 2


def test_opposite_order_is_fine_when_asynchronous(world: World) -> None:
    """Issuing does not block, so calls on two groups may be issued in opposite orders."""

    def program() -> list[float]:
        groups, tensors = [dist.new_group([0, 1]), dist.new_group([0, 1])], [torch.ones(1), torch.ones(2)]
        order = (0, 1) if dist.get_rank() else (1, 0)
        for work in [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]:
            work.wait()
        return torch.cat(tensors).tolist()

    assert world(2).run(program).values == ([2.0, 2.0, 2.0],) * 2


def reduce_other(rank: int) -> None:
    """A different reduction."""
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def type_other(rank: int) -> None:
    """A different element type."""
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))


def size_other(rank: int) -> None:
    """A different size."""
    dist.all_reduce(torch.ones(2 + rank))


def root_other(rank: int) -> None:
    """A different root."""
    dist.broadcast(torch.ones(2), src=rank)


def call_other(rank: int) -> None:
    """A different collective."""
    dist.barrier() if rank else dist.all_reduce(torch.ones(2))


def splits_other(_: int) -> None:
    """Splits not expected by the other rank."""
    dist.all_to_all_single(torch.ones(3), torch.ones(3), [2, 1], [2, 1])


def message_other(rank: int) -> None:
    """A message of a different size."""
    dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(2), 1)


MISTAKES = [reduce_other, type_other, size_other, root_other, call_other, splits_other, message_other]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mismatch(world: World, mistake: Callable[[int], None]) -> None:
    """Ranks with different calls at the same position are a mismatch, not a deadlock, and both calls are named."""
    failure = failure_of(world(2), lambda: mistake(dist.get_rank()))
    assert failure.kind is FailureKind.MISMATCH
    assert failure.hung
    assert states(failure) == [RankState.WAITING] * 2
    assert "rank 1 issued" in failure.summary
    assert "but rank 0 issued" in failure.summary
    assert "\n" not in failure.summary
    assert all(report.pending and report.stack for report in failure.reports)


def test_rank_that_raises(world: World) -> None:
    """The error comes before the hang that it causes; pending calls of other ranks are named."""

    def program() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.barrier()

    failure = failure_of(world(3), program)
    assert failure.kind is FailureKind.RAISED
    assert not failure.hung
    assert failure.summary == "rank 1 raised ValueError: no such layer"
    assert states(failure) == [RankState.WAITING, RankState.RAISED, RankState.WAITING]
    assert failure.reports[1].error == "ValueError: no such layer"
    assert 'raise ValueError("no such layer")' in failure.reports[1].stack
    assert failure.reports[0].pending == "barrier on ranks (0, 1, 2), call 0"


def test_all_ranks_raise(world: World) -> None:
    """The first error is the cause; all are reported."""

    def program() -> None:
        raise SystemExit(f"rank {dist.get_rank()}")

    failure = failure_of(world(2), program)
    assert failure.kind is FailureKind.RAISED
    assert failure.summary == "rank 0 raised SystemExit: rank 0"
    assert [report.error for report in failure.reports] == ["SystemExit: rank 0", "SystemExit: rank 1"]


def test_endless_loop(world: World) -> None:
    """A rank that computes forever is a timeout with its stack, and is unwound."""
    unwound = threading.Event()

    def program() -> None:
        try:
            while dist.get_rank() == 1:
                pass
        finally:
            if dist.get_rank() == 1:
                unwound.set()
        dist.barrier()

    failure = failure_of(world(2), program, deadline=0.2)
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.hung
    assert unwound.is_set()
    assert states(failure) == [RankState.WAITING, RankState.RUNNING]
    assert "in program" in failure.reports[1].stack


def test_a_rank_that_had_not_begun_does_not_begin_when_its_run_is_given_up(world: World) -> None:
    """If it began, it would compute next to all later runs of the process."""
    began: list[int] = []

    def program() -> None:
        began.append(dist.get_rank())
        while True:
            pass

    with pytest.raises(RanksFailed) as failed:
        world(2).run(program, deadline=0.2)
    assert "still run in this process" not in str(failed.value)
    assert began == [0]
    assert abandoned_threads() == ()


def test_rank_that_will_not_go(world: World) -> None:
    """A rank that swallows the unwinding is abandoned; later runs use new ranks, and warn while it exists."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def program() -> None:
        threads.append(threading.current_thread())
        while dist.get_rank() == 0 and not stop.is_set():
            with contextlib.suppress(BaseException):
                stop.wait()

    try:
        with pytest.raises(RanksFailed, match=r"could not be stopped still run in this process.*: 0$"):
            world(2).run(program, deadline=0.1)
        with pytest.warns(RuntimeWarning, match="prove nothing: sim-rank-0"):
            assert world(2).run(dist.get_rank).values == (0, 1)
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    assert world(2).run(dist.get_rank).values == (0, 1)


def test_cleanup_code_cannot_communicate(world: World) -> None:
    """A rank that calls a collective while it unwinds is unwound again, and does not hang."""

    def program() -> None:
        try:
            if dist.get_rank() == 0:
                dist.barrier()
        finally:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))

    assert failure_of(world(2), program).kind is FailureKind.DEADLOCK


def test_calls_never_waited_for_do_not_leak(world: World) -> None:
    """Calls without a wait do not affect the next run."""

    def program() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.isend(torch.ones(5), 1)
            kept.append(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))

    def next_program() -> int:
        tensor = torch.ones(1)
        dist.recv(tensor, 0) if dist.get_rank() else dist.send(tensor, 1)
        return int(torch._C._distributed_c10d._get_work_registry_size())

    kept: list[torch.Tensor] = []
    for _ in range(2):
        world(2).run(program)
        assert world(2).run(total).values == (1.0, 1.0)
        assert world(2).run(next_program).values == (0, 0)


def ddp_step(*, skip: int | None = None, raise_in: int | None = None) -> list[float]:
    """One DDP backward; a rank may skip it or raise in it."""
    rank = dist.get_rank()
    linear = nn.Linear(2, 1, bias=False)
    nn.init.ones_(linear.weight)
    if rank == raise_in:
        linear.weight.register_hook(lambda grad: 1 / 0)
    model = nn.parallel.DistributedDataParallel(linear)
    loss = model(torch.full((1, 2), float(rank + 1))).sum()
    if rank != skip:
        loss.backward()
    return [] if linear.weight.grad is None else linear.weight.grad.flatten().tolist()


def test_ddp_rank_skips_backward(world: World) -> None:
    """Unwinding a rank inside the C++ of a DDP backward is harmless: the next DDP step is right."""
    failure = failure_of(world(2), lambda: ddp_step(skip=1))
    assert failure.kind is FailureKind.DEADLOCK
    assert states(failure) == [RankState.WAITING, RankState.FINISHED]
    assert failure.reports[0].pending.startswith("all_reduce.sum float32[2]")
    assert "loss.backward()" in failure.reports[0].stack
    assert world(2).run(ddp_step).values == ([1.5, 1.5],) * 2


def test_ddp_rank_raises_in_backward(world: World) -> None:
    """An error in a hook under C++ keeps its type, and the next DDP step is right."""
    failure = failure_of(world(2), lambda: ddp_step(raise_in=0))
    assert failure.kind is FailureKind.RAISED
    assert failure.summary == "rank 0 raised ZeroDivisionError: division by zero"
    assert world(2).run(ddp_step).values == ([1.5, 1.5],) * 2


class Kept(torch.autograd.Function):
    """A node keeping its input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, kept: object) -> torch.Tensor:
        """Twice the inputs."""
        ctx.kept = kept
        return 2 * inputs

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Twice the gradient."""
        return 2 * grad, None


def test_what_is_left_of_a_backward_that_raised_is_dropped(world: World) -> None:
    """Unfinished nodes keep nothing alive, and are not freed at the end of the thread, without the interpreter's lock."""
    left: list[weakref.ref[nn.Module]] = []

    def program() -> None:
        kept = nn.Module()
        left.append(weakref.ref(kept))
        older = Kept.apply(torch.ones(3, requires_grad=True), kept)
        newer = torch.ones(3, requires_grad=True) * 2
        newer.register_hook(lambda grad: 1 / 0)
        (older.sum() + newer.sum()).backward()

    with pytest.raises(RanksFailed, match="ZeroDivisionError"):
        world(2).run(program)
    gc.collect()

    assert [reference() for reference in left] == [None, None]


def test_many_failures_in_a_row(world: World) -> None:
    """Many failures neither break the world nor add threads."""

    def program() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    failure_of(world(2), program)
    before = threading.active_count()
    for _ in range(50):
        with pytest.raises(RanksFailed):
            world(2).run(program)
    assert threading.active_count() == before


def checkpointed(function: Callable[[], Any]) -> Any:
    """Call a function with saved-tensor hooks entered in a generator, as torch's checkpointing before 2.13 does."""

    def entered() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
            yield

    generator = entered()
    next(generator)
    value = function()
    next(generator, None)
    return value


def square_gradient() -> float:
    """Derivative of x * x at 3, for which x is saved."""
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad.item()


def wait_or_raise() -> None:
    """Rank 0 raises while rank 1 waits for it."""
    if dist.get_rank() == 0:
        raise ValueError("the reason")
    dist.barrier()


def raise_another() -> None:
    """Rank 0 raises a second error from the first, whose hooks are still open."""
    try:
        checkpointed(wait_or_raise)
    except ValueError as error:
        raise KeyError("another") from error


@pytest.mark.parametrize("fail", [wait_or_raise, raise_another])
def test_contexts_of_generators_end_with_the_program(world: World, fail: Callable[[], None]) -> None:
    """Hooks entered by a program in a generator before it raised or was unwound are not called in the next program."""
    ranks = world(2)
    failure_of(ranks, lambda: checkpointed(fail))
    assert ranks.run(square_gradient).values == (6.0, 6.0)


def test_run_inside_a_run_is_refused(world: World) -> None:
    """A rank cannot run a simulated world itself."""

    def program() -> str:
        try:
            world(2).run(total)
        except EquivCheckError as error:
            return str(error)
        return ""

    assert (
        world(2).run(program).values[0]
        == "SimRanks.run: a call from a rank thread is not supported: call it from another thread."
    )


def test_ranks_that_cannot_join_are_no_failure_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch fails to create their world, no program runs, no thread is left, and a later run tries again."""
    before = threading.active_count()
    ranks = SimRanks(2)
    with monkeypatch.context() as patched:
        patched.setattr("equivcheck.worlds.sim.rank_threads.join_world", _refuses_to_join)
        with pytest.raises(
            RanksDidNotStart, match="the sim ranks could not form a process group: rank 0 raised RuntimeError: no backend"
        ):
            ranks.run(total)
        assert threading.active_count() == before
    assert ranks.run(total).values == (1.0, 1.0)
    ranks.close()


def _refuses_to_join(*_: object) -> None:
    raise RuntimeError("no backend")


def test_size_is_checked() -> None:
    """A world has at least one rank."""
    with pytest.raises(EquivCheckError, match="size 0 is not valid"):
        SimRanks(0)


INTERRUPTED = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from equivcheck.worlds.sim.ranks import SimRanks
world, ranks = c10d._world, SimRanks(2)
ranks.run(dist.barrier)
def program():
    if sys.argv[1] == "computing":
        while dist.get_rank() == 1:
            time.sleep(0.01)
    dist.barrier()
    time.sleep(30)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ranks.run(program)
except KeyboardInterrupt:
    print("interrupted", c10d._world is world, dist.is_initialized())
print(ranks.run(dist.get_rank).values)
ranks.close()
print([thread.name for thread in threading.enumerate() if thread.name.startswith("sim") and sys.argv[1] == "computing"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("state", ["computing", pytest.param("sleeping", marks=pytest.mark.slow)])
def test_interrupt(state: str) -> None:
    """Ctrl-C ends a run at once, restores torch, and leaves usable ranks."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, state], check=False, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["interrupted True False", "(0, 1)", "[]"], done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
