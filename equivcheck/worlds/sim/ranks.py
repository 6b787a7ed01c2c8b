"""World ``sim``: N ranks are threads in this process, and one of them runs at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.dtensor_caches import patchable_propagation
from equivcheck.worlds.processes.preload import preload, preload_common
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.sim.dtensor.private import is_unshared, shared_propagation, without_caches
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.sim.mesh_private import per_thread_meshes
from equivcheck.worlds.sim.process_group import make_group
from equivcheck.worlds.sim.rank_threads import RankThreads
from equivcheck.worlds.sim.stand_ins import stand_ins
from equivcheck.worlds.sim.torch_private import is_rank_thread, keep_device_guard, keep_num_threads, separate_worlds
from equivcheck.worlds.state.keeper import StateKeeper, preserved_state

STILL_RUN = "threads of an aborted run still run in this process, so later runs in it prove nothing"

_one_run_at_a_time = threading.Lock()


@contextlib.contextmanager
def threads_as_ranks(make_group: Callable[[Any, Any], Any], state: StateKeeper, *, is_user_code: bool = False) -> Iterator[None]:
    """Inside this context, threads can be ranks in `torch.distributed`. `make_group` creates their process groups.

    On exit, `state` restores torch's variables. If the ranks ran a user's program, it also restores all other process state.
    """
    keep_device_guard()
    with (
        _one_run_at_a_time,
        preserved_state(state) if is_user_code else state.variables.kept(),
        keep_num_threads(),
        separate_worlds(make_group),
        per_thread_meshes(),
    ):
        yield


class SimRanks(Ranks):
    """Ranks as threads in this process. Runs are deterministic, and deadlocks are detected at once.

    One rank runs until it waits in a communication call. Ranks share all Python modules, but each has its own
    `torch.distributed`, default random generator and autograd. After each run the state of the process is restored. If a program
    changed torch's state in a thread, new threads replace the old.
    """

    name = "sim"

    def __init__(self, size: int) -> None:
        if size < 1:
            raise EquivCheckError(f"size {size} is not valid: a sim world needs at least one rank. Expected 1 or more.")
        super().__init__(size)
        self._threads: RankThreads | None = None
        self._state = StateKeeper()

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Call ``program(*arguments)`` on every rank and wait for all of them; see `Ranks.run`.

        With schedule seed 0, ranks run in the order in which they become ready. Other seeds choose a random order. In a few
        runs, chosen by the seed, ranks share no DTensor caches.
        """
        if is_rank_thread():
            raise EquivCheckError("SimRanks.run: a call from a rank thread is not supported: call it from another thread.")
        if abandoned := abandoned_threads():
            warnings.warn(f"SimRanks.run: {STILL_RUN}: {', '.join(abandoned)}", RuntimeWarning, stacklevel=3)
        (preload if is_user_code else preload_common)()
        called: Callable[[], Any] = functools.partial(program, *arguments)
        sharing: AbstractContextManager[set[str]] = shared_propagation()
        if is_unshared(schedule_seed):
            called, sharing = without_caches(called), contextlib.nullcontext(set())
        with (
            threads_as_ranks(make_group, self._state, is_user_code=is_user_code),
            patchable_propagation(),
            sharing as asked,
            stand_ins(),
        ):
            threads = self._ready_threads()
            try:
                return replace(threads.run(called, schedule_seed, deadline), shardings=frozenset(asked))
            finally:
                self._let_go(threads)

    def close(self) -> None:
        """End the rank threads. A later run starts new threads."""
        threads, self._threads = self._threads, None
        if threads is not None:
            with threads_as_ranks(make_group, self._state):
                threads.dismiss()

    def _ready_threads(self) -> RankThreads:
        if self._threads is not None and self._threads.board.has_too_many_groups:
            threads, self._threads = self._threads, None
            threads.dismiss()
        if self._threads is None:
            threads = RankThreads(self.size, self._state.variables)
            threads.join()
            self._threads = threads
        return self._threads

    def _let_go(self, threads: RankThreads) -> None:
        """Drop threads that the run has made unusable or changed."""
        if not threads.usable or threads.is_changed:
            self._threads = None
        if threads.usable and threads.is_changed:
            threads.dismiss()
