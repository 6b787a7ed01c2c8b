"""Lets exactly one rank run at a time: holds the baton, chooses the next rank, and detects deadlocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from equivcheck.worlds.dtensor_caches import num_plans
from equivcheck.worlds.patience import Patience

POLLS_IN_VAIN = 10_000
"""Consecutive unsuccessful `is_completed` calls on all ranks after which polling counts as waiting; about half a second."""


IMPORT_CPU_SECONDS = 0.01
"""Minimum CPU seconds that a progressing import uses between two observations; far more than an observation itself."""


class RankAborted(BaseException):
    """Ends the thread of a rank whose run is over. It is not an `Exception`, so programs do not catch it by accident."""


class Scheduler:
    """Lets one rank thread run at a time, in an order that depends only on the schedule seed.

    The running rank holds a baton and passes it on. Ranks call these methods while they hold the baton, and the owner calls the
    other methods while no rank runs, so no lock is needed.
    """

    def __init__(self, size: int, save_state: Callable[[], Any], restore_state: Callable[[Any], Any]) -> None:
        self.size = size
        self.aborting = False
        self.abandoned = False
        self.mismatch = ""
        self.ended = [True] * size
        self.holder = 0
        self.pending: list[Any] = [None] * size
        self._save_state = save_state
        self._restore_state = restore_state
        self._batons = [_taken_lock() for _ in range(size)]
        self._quiet = _taken_lock()
        self._runnable: deque[int] = deque()
        self._chooser: Random | None = None
        self._polls = 0
        self._moves = 0

    # Called by the thread that owns the run.

    def start(self, schedule_seed: int) -> None:
        """Let every rank run, the first one at once."""
        self.aborting = False
        self.mismatch = ""
        self.ended = [False] * self.size
        self.pending = [None] * self.size
        self._polls = 0
        self._chooser = Random(schedule_seed) if schedule_seed else None
        self._runnable.clear()
        self._runnable.extend(range(self.size))
        self._pass_on()

    def wait_until_quiet(self, limit: float, is_importing: Callable[[], bool] = lambda: False) -> str:
        """Wait until all ranks have ended or are stuck, or until they count as hung.

        Returns the reason if ranks count as hung, else "". An import that makes progress counts as progress of a rank, because it
        must not be interrupted. Planning in DTensor counts, too, because it can take minutes and ends by itself.
        """
        importing = _Imports(is_importing)
        patience = Patience(limit, lambda: {0: time.process_time()}, lambda: self._moves + importing.num_seen() + num_plans())
        while not self._quiet.acquire(timeout=min(patience.tick, threading.TIMEOUT_MAX)):
            if why := patience.exhausted():
                return why
        return ""

    def abort(self, patience: float) -> bool:
        """End unfinished ranks while no rank runs. Returns False if a rank does not end within `patience` seconds."""
        self.aborting = True
        for rank in range(self.size):
            if not self.ended[rank]:
                self._batons[rank].release()
                if not self._quiet.acquire(timeout=patience):
                    return False
        return True

    def release_all(self) -> None:
        """Wake all sleeping ranks at once, in any state. Only for threads that will not be used again."""
        self.aborting = self.abandoned = True
        for baton in self._batons:
            if baton.locked():
                baton.release()

    # Called by ranks.

    def sleep(self, rank: int) -> None:
        """Wait for this rank's turn in the next run."""
        self._batons[rank].acquire()

    def finish(self, rank: int) -> None:
        """End the rank's part in the run, and drop the state that the rank has changed."""
        self.ended[rank] = True
        if not self.abandoned:
            self._save_state()
        if not self.aborting:
            self._pass_on()
        elif self._quiet.locked():
            self._quiet.release()

    def check(self) -> None:
        """Raise `RankAborted` in a rank whose run is over."""
        if self.aborting:
            raise RankAborted

    def block(self, rank: int, pending: Any) -> None:
        """Wait until another rank calls `wake` for this one. `pending` describes the call in which it waits."""
        if self.aborting:
            raise RankAborted
        self.pending[rank] = pending
        self._pass_baton(rank)
        self.pending[rank] = None

    def wake(self, rank: int) -> None:
        """Make a rank runnable, because the event for which it waits has come."""
        self._polls = 0
        self._runnable.append(rank)

    def poll(self, rank: int, pending: Any) -> bool:
        """Let other ranks run before the rank polls again. Returns False if the rank should wait instead."""
        if self.aborting:
            raise RankAborted
        self._polls += 1
        if self._polls > POLLS_IN_VAIN:
            return False
        if self._runnable:
            self.pending[rank] = pending
            self._runnable.append(rank)
            self._pass_baton(rank)
            self.pending[rank] = None
        return True

    def progress(self) -> None:
        """Record a rank's call, so that ranks may continue polling."""
        self._polls = 0
        self._moves += 1

    def give_up(self, rank: int, pending: Any, mismatch: str) -> None:
        """End the run of all ranks, because the rank's call does not match another rank's. Does not return."""
        if self.aborting:
            raise RankAborted
        self.mismatch = mismatch
        self.pending[rank] = pending
        self._wait_after(rank, self._quiet.release)

    def _pass_baton(self, rank: int) -> None:
        self._wait_after(rank, self._pass_on)

    def _wait_after(self, rank: int, let_go: Callable[[], None]) -> None:
        """Release the baton and wait for it; a rank whose run has ended meanwhile also restores its state before it unwinds."""
        state = self._save_state()
        let_go()
        self._batons[rank].acquire()
        if not self.abandoned:
            self._restore_state(state)
        if self.aborting:
            raise RankAborted

    def _pass_on(self) -> None:
        self._moves += 1
        runnable = self._runnable
        if not runnable:
            self._quiet.release()
        elif self._chooser is None:
            self.holder = holder = runnable.popleft()
            self._batons[holder].release()
        else:
            self.holder = holder = self._chooser.choice(sorted(runnable))
            runnable.remove(holder)
            self._batons[holder].release()


class _Imports:
    """Counts observations at which the running rank was inside a progressing import."""

    def __init__(self, is_importing: Callable[[], bool]) -> None:
        self._is_importing = is_importing
        self._num_seen, self._cpu = 0, time.process_time()

    def num_seen(self) -> int:
        before, self._cpu = self._cpu, time.process_time()
        if self._cpu - before > IMPORT_CPU_SECONDS and self._is_importing():
            self._num_seen += 1
        return self._num_seen


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
