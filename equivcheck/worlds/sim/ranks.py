"""N ranks as kept-alive threads of this process, one running at a time."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.failure import RanksDidNotStart, RanksFailed
from equivcheck.worlds.forks import WatchedForks
from equivcheck.worlds.meshes import end_run, groups_of_rank, has_lost
from equivcheck.worlds.preload import preload
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.sim.dtensor_private import shared_propagation
from equivcheck.worlds.sim.exchange import call_of
from equivcheck.worlds.sim.failures import Evidence, failure_of, with_abandoned
from equivcheck.worlds.sim.interruption import abandon, abandoned_threads, interrupt, is_importing
from equivcheck.worlds.sim.mesh_private import meshes_of_threads
from equivcheck.worlds.sim.process_group import make_group, take_seat
from equivcheck.worlds.sim.scheduler import RankAborted, Scheduler
from equivcheck.worlds.sim.stand_ins import stand_ins
from equivcheck.worlds.sim.stand_ins.profiling import end_profiling
from equivcheck.worlds.sim.switchboard import Switchboard
from equivcheck.worlds.sim.torch_private import (
    HashStore,
    drop_unfinished_backward,
    is_rank_thread,
    join_world,
    keep_device_guard,
    keep_num_threads,
    num_unwaited_works,
    prepare_rank_thread,
    separate_worlds,
)
from equivcheck.worlds.sim.unwinding import close_frames
from equivcheck.worlds.state.keeper import StateKeeper, changes, kept_state, read
from equivcheck.worlds.state.of_thread import OF_THREAD
from equivcheck.worlds.state.rank_variables import RankVariables

JOIN_SECONDS = 120.0
"""Limit for making a world, in which ranks only compute: generous, as machines can be busy."""
IMPORT_SECONDS = 120.0
"""Limit for the end of an import during which a run is given up, as an interrupted one breaks the module for good."""
UNWIND_PATIENCE = 5.0
"""Seconds that a rank gets to unwind after its run was given up, before its thread is abandoned."""

INTERRUPT_PATIENCE = 1.0
"""Seconds that a rank which computes gets to notice that its run was given up."""

STILL_RUN = "threads of a run that was given up still run in this process, so that later runs in it prove nothing"

Program = Callable[[], Any]

_one_run_at_a_time = threading.Lock()


@contextlib.contextmanager
def threads_as_ranks(make_group: Callable[[Any, Any], Any], state: StateKeeper, *, is_foreign: bool = False) -> Iterator[None]:
    """While entered, torch can be used by rank threads, one at a time, whose groups `make_group` makes.

    On leaving, what foreign programs have changed in the process is as it was.
    """
    keep_device_guard()
    with (
        _one_run_at_a_time,
        kept_state(state) if is_foreign else state.variables.kept(),
        keep_num_threads(),
        separate_worlds(make_group),
        meshes_of_threads(),
    ):
        yield


class SimRanks(Ranks):
    """Ranks as threads: deterministic, and able to say at once that they wait for each other in vain.

    One baton goes around: the rank that holds it runs until it waits in a communication call. Ranks share this process,
    so its modules and defaults too, but each has a `torch.distributed`, a state of the
    default random generator and autograd of its own. After each run the process is as it was before; threads that a run leaves
    changed are replaced.
    """

    name = "sim"

    def __init__(self, size: int) -> None:
        if size < 1:
            raise EquivCheckError(f"SimRanks: size is {size}, allowed is 1 or more")
        super().__init__(size)
        self._crew: Crew | None = None
        self._state = StateKeeper()

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,
        deadline: float = 60.0,
        is_foreign: bool = True,
    ) -> Run:
        """Call ``program(*arguments)`` on every rank and wait for all of them; see `Ranks.run`.

        Schedule seed 0 lets ranks run in the order in which they become able to, other seeds in a random order of their own.
        """
        if is_rank_thread():
            raise EquivCheckError("SimRanks.run: called by a rank of a simulated world, allowed is any other thread")
        if abandoned := abandoned_threads():
            warnings.warn(f"SimRanks.run: {STILL_RUN}: {', '.join(abandoned)}", RuntimeWarning, stacklevel=3)
        preload()
        with threads_as_ranks(make_group, self._state, is_foreign=is_foreign), shared_propagation(), stand_ins():
            crew = self._ready_crew()
            try:
                return crew.run(lambda: program(*arguments), schedule_seed, deadline)
            finally:
                self._let_go(crew)

    def close(self) -> None:
        """End the rank threads; the ranks start anew when they run again."""
        crew, self._crew = self._crew, None
        if crew is not None:
            with threads_as_ranks(make_group, self._state):
                crew.dismiss()

    def _ready_crew(self) -> Crew:
        if self._crew is not None and self._crew.board.has_too_many_groups:
            crew, self._crew = self._crew, None
            crew.dismiss()
        if self._crew is None:
            crew = Crew(self.size, self._state.variables)
            crew.join()
            self._crew = crew
        return self._crew

    def _let_go(self, crew: Crew) -> None:
        """Use a crew no more that a run has left unusable, or otherwise than it found it."""
        if not crew.usable or crew.is_changed:
            self._crew = None
        if crew.usable and crew.is_changed:
            crew.dismiss()


class Crew:
    """The threads of one world, from their start until they are dismissed or a run leaves them unusable."""

    def __init__(self, size: int, variables: RankVariables) -> None:
        self.scheduler = Scheduler(size, variables.save, variables.restore)
        self.board = Switchboard(size, self.scheduler)
        self.usable = True
        self.is_changed = False
        """Whether a program has left something of a rank's own changed: its groups, or what torch keeps for a thread."""
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
        """Make the world. Raises `RanksDidNotStart`, and ends the threads."""
        try:
            self.run(self.join_world, 0, JOIN_SECONDS)
        except RanksFailed as error:
            self.dismiss()
            raise RanksDidNotStart(f"the ranks of sim could not join: {error}") from None

    def join_world(self) -> None:
        """Give the calling rank its default group."""
        rank = self._threads.index(threading.current_thread())
        join_world(self._store, rank, self.scheduler.size)

    def run(self, program: Program, schedule_seed: int, deadline: float) -> Run:
        """Run the program on all ranks, with the world's groups as they are."""
        self._program = program
        try:
            self.scheduler.start(schedule_seed)
            hung = self.scheduler.wait_until_quiet(deadline, self._is_importing)
            if hung or self._errors or not all(self.scheduler.ended):
                self._give_up(hung)
            return Run(values=tuple(self._values), calls=tuple(tuple(map(call_of, calls)) for calls in self.board.calls))
        except BaseException as error:
            if not isinstance(error, RanksFailed):
                self._abandon(INTERRUPT_PATIENCE)
            raise
        finally:
            self._clear()

    def dismiss(self) -> None:
        """Leave the world and end the threads."""
        with contextlib.suppress(RanksFailed):
            self.run(dist.destroy_process_group, 0, UNWIND_PATIENCE)
        self.scheduler.release_all()
        for thread in self._threads:
            thread.join(UNWIND_PATIENCE)

    def _give_up(self, hung: str) -> None:
        idents = tuple(thread.ident or 0 for thread in self._threads)
        evidence = Evidence(scheduler=self.scheduler, thread_idents=idents, errors=dict(self._errors), hung=hung)
        failure = failure_of(evidence)
        if hung or not self.scheduler.abort(UNWIND_PATIENCE):
            self._abandon(IMPORT_SECONDS)
            failure = with_abandoned(failure, [rank for rank, thread in enumerate(self._threads) if thread.is_alive()])
        raise RanksFailed(failure)

    def _abandon(self, import_seconds: float) -> None:
        """Unwind the threads as far as possible, and never use them again."""
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
        """Whether the rank that runs is inside an import."""
        return is_importing(self._threads[self.scheduler.holder])

    def _clear(self) -> None:
        """Drop everything that belongs to the run, so that a program's tensors do not outlive it."""
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
                self._serve_once(rank, program)
                self.is_changed |= has_lost(groups) or bool(changes(OF_THREAD, own_state))
                del program
                self.scheduler.finish(rank)

    def _serve_once(self, rank: int, program: Program) -> None:
        torch.default_generator.set_state(self._rng_states[rank])
        try:
            with WatchedForks():
                self._values[rank] = program()
        except BaseException as error:
            if not isinstance(error, RankAborted):
                self._errors[rank] = error
            close_frames(error)
            with contextlib.suppress(RuntimeError):  # a program may have left something switched on that forbids it
                drop_unfinished_backward()
        end_profiling()
        if num_unwaited_works():
            self._drop_works(rank)
        end_run()

    def _drop_works(self, rank: int) -> None:
        """Take the rank's handles that nobody waited for out of torch's registry, which would keep them for ever."""
        for work in self.board.abandon(rank):
            for tensor in work.outputs:
                torch.ops._c10d_functional.wait_tensor(tensor)
