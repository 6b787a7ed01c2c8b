"""Threads as the ranks of one world, and runs on these threads."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from equivcheck.system.threads import wait_for_end_of
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import RanksDidNotStart, RanksFailed
from equivcheck.worlds.meshes import end_run, groups_of_rank, has_lost_groups, numbers_of_groups
from equivcheck.worlds.processes.forks import WatchedForks
from equivcheck.worlds.ranks import Run
from equivcheck.worlds.sim.exchange import call_of
from equivcheck.worlds.sim.failures import AbortedRun, failure_of, with_abandoned
from equivcheck.worlds.sim.interruption import abandon, interrupt, is_importing
from equivcheck.worlds.sim.process_group import take_seat
from equivcheck.worlds.sim.scheduler import RankAborted, Scheduler
from equivcheck.worlds.sim.stand_ins.profiling import end_profiling
from equivcheck.worlds.sim.switchboard import Switchboard
from equivcheck.worlds.sim.torch_private import (
    HashStore,
    drop_unfinished_backward,
    join_world,
    num_unwaited_works,
    prepare_rank_thread,
)
from equivcheck.worlds.state.keeper import changes, read
from equivcheck.worlds.state.of_thread import OF_THREAD
from equivcheck.worlds.state.rank_variables import RankVariables

JOIN_SECONDS = 120.0
"""Limit in seconds for forming a world. The limit is long, because machines can be busy although ranks only compute."""
IMPORT_SECONDS = 120.0
"""Limit in seconds for an import to end before its thread is interrupted, because an interrupted import breaks the module
permanently."""
UNWIND_PATIENCE = 5.0
"""Seconds for a rank to unwind after its run was stopped; then its thread is abandoned."""
INTERRUPT_PATIENCE = 1.0
"""Seconds for a computing rank to notice that its run was stopped."""
Program = Callable[[], Any]


class RankThreads:
    """The rank threads of one simulated world. They can run several programs, until a run fails or `dismiss` is called."""

    def __init__(self, size: int, variables: RankVariables) -> None:
        self.scheduler = Scheduler(size, variables.save, variables.restore)
        self.board = Switchboard(size, self.scheduler)
        self.usable = True
        self.is_changed = False
        """Whether a program changed a rank's groups or its per-thread state of torch.

        Unequal numbers of groups count as a change, because ranks would name the next group differently and each would wait in
        its own.
        """
        self._numbers_of_groups: list[tuple[int, int]] = [(0, 0)] * size
        self._store = HashStore()
        self._program: Program | None = None
        self._values: list[Any] = [None] * size
        self._errors: dict[int, BaseException] = {}
        self._rng_states = [torch.Generator().manual_seed(rank).get_state() for rank in range(size)]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"sim-rank-{rank}") for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Create the default group on all ranks. If that fails, end the threads and raise `RanksDidNotStart`."""
        try:
            self.run(self.join_world, 0, JOIN_SECONDS)
        except RanksFailed as error:
            self.dismiss()
            raise RanksDidNotStart(f"the sim ranks could not form a process group: {error}") from None

    def join_world(self) -> None:
        """Create the default group on the calling rank."""
        rank = self._threads.index(threading.current_thread())
        join_world(self._store, rank, self.scheduler.size)

    def run(self, program: Program, schedule_seed: int, deadline: float) -> Run:
        """Run the program on all ranks. The world's process groups stay from run to run.

        Raises `RanksFailed` if a rank raises, or if ranks hang.
        """
        self._program = program
        try:
            self.scheduler.start(schedule_seed)
            hung = self.scheduler.wait_until_quiet(deadline, self._is_importing)
            if hung or self._errors or not all(self.scheduler.ended):
                self._give_up(hung)
            return Run(values=tuple(self._values), calls=self._calls())
        except BaseException as error:
            if not isinstance(error, RanksFailed):
                self._abandon(INTERRUPT_PATIENCE)
            raise
        finally:
            self.is_changed |= len(set(self._numbers_of_groups)) > 1
            self._clear()

    def dismiss(self) -> None:
        """Destroy the process groups and end the threads."""
        with contextlib.suppress(RanksFailed):
            self.run(dist.destroy_process_group, 0, UNWIND_PATIENCE)
        self.scheduler.release_all()
        for thread in self._threads:
            wait_for_end_of(thread, UNWIND_PATIENCE)

    def _give_up(self, hung: str) -> None:
        idents = tuple(thread.ident or 0 for thread in self._threads)
        evidence = AbortedRun(scheduler=self.scheduler, thread_idents=idents, errors=dict(self._errors), hung=hung)
        failure, calls = failure_of(evidence), self._calls()
        if hung or not self.scheduler.abort(UNWIND_PATIENCE):
            self._abandon(IMPORT_SECONDS)
            failure = with_abandoned(failure, [rank for rank, thread in enumerate(self._threads) if thread.is_alive()])
        raise RanksFailed(failure, calls)

    def _calls(self) -> tuple[tuple[Call, ...], ...]:
        return tuple(tuple(map(call_of, calls)) for calls in self.board.calls)

    def _abandon(self, import_seconds: float) -> None:
        """Unwind as many threads as possible, and never use them again."""
        self.usable = False
        self.scheduler.aborting = True
        holder = self.scheduler.holder
        if not self.scheduler.ended[holder]:
            interrupt(self._threads[holder], RankAborted, import_seconds)
        self.scheduler.release_all()
        for thread in self._threads:
            thread.join(INTERRUPT_PATIENCE)
        abandon(self._threads)

    def _is_importing(self) -> bool:
        """Whether the running rank is inside an import."""
        return is_importing(self._threads[self.scheduler.holder])

    def _clear(self) -> None:
        """Drop references to the run, so that a program's tensors do not outlive it."""
        self.board.clear()
        self._program = None
        self._values = [None] * self.scheduler.size
        self._errors = {}

    def _serve(self, rank: int) -> None:
        prepare_rank_thread()
        take_seat(self.board, rank)
        own_state = read(OF_THREAD)
        with contextlib.suppress(RankAborted):
            while self.usable:
                self.scheduler.sleep(rank)
                program = self._program
                if program is None:
                    return
                groups = groups_of_rank()
                if not self.scheduler.aborting:  # else its run was given up before it began
                    self._serve_once(rank, program)
                self.is_changed |= has_lost_groups(groups) or bool(changes(OF_THREAD, own_state))
                self._numbers_of_groups[rank] = numbers_of_groups()
                del program
                self.scheduler.finish(rank)

    def _serve_once(self, rank: int, program: Program) -> None:
        torch.default_generator.set_state(self._rng_states[rank])
        finished = False
        try:
            with WatchedForks():
                self._values[rank] = program()
            finished = True
        except BaseException as error:
            if not isinstance(error, RankAborted):
                self._errors[rank] = error
            close_frames(error)
            with contextlib.suppress(RuntimeError):  # a program may have left something switched on that forbids it
                drop_unfinished_backward()
        end_profiling()
        if num_unwaited_works():
            self._drop_works(rank)
        end_run(finished=finished)

    def _drop_works(self, rank: int) -> None:
        """Remove works that the rank never waited for from torch's registry, which would keep them forever."""
        for work in self.board.abandon(rank):
            for tensor in work.outputs:
                torch.ops._c10d_functional.wait_tensor(tensor)


def close_frames(error: BaseException) -> None:
    """Clear the local variables in an exception's traceback, so that generators among them end now, on the calling thread.

    A context inside a generator exits when the generator ends. If it exited later on another thread, its effect would stay on
    this thread. For example, before torch 2.13 activation checkpointing's saved-tensor hooks would run in every later program.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += (one.__cause__, one.__context__)
            traceback.clear_frames(one.__traceback__)
