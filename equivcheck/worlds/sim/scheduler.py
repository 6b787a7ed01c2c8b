"""Lets exactly one rank thread run at a time, chooses the next one, and detects deadlocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from equivcheck.worlds.patience import Patience
from equivcheck.worlds.sim.dtensor.private import num_planning_steps

POLLS_IN_VAIN = 10_000
"""Consecutive unsuccessful `is_completed` calls on all ranks after which polling counts as waiting; about half a second."""


IMPORT_CPU_SECONDS = 0.01
"""Minimum CPU seconds that a progressing import uses between two observations; far more than an observation itself."""


class RankAborted(BaseException):
    """Ends the thread of a rank whose run is over. It is not an `Exception`, so programs do not catch it by accident."""


class Scheduler:
    """Lets one rank thread run at a time, in an order that depends only on the schedule seed.

    The running rank holds a baton (a lock), and passes it on when it waits. A rank calls methods only while it holds the baton.
    The thread that started the run calls methods only while no rank runs. So the scheduler's own data needs no lock.
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
        """Start a run: all ranks may run, and the first one starts at once."""
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
        """Wait until each rank has ended or waits for another rank, or until ranks count as hung after `limit` seconds.

        Returns the reason if ranks count as hung, otherwise an empty text. Imports and DTensor's planning count as progress,
        because an import must not be interrupted, and planning can take minutes but always ends.
        """
        importing = _Imports(is_importing)
        patience = Patience(
            limit, lambda: {0: time.process_time()}, lambda: self._moves + importing.num_seen() + num_planning_steps()
        )
        while not self._quiet.acquire(timeout=min(patience.tick, threading.TIMEOUT_MAX)):
            if why := patience.exhausted():
                return why
        return ""

    def abort(self, patience: float) -> bool:
        """End all unfinished ranks, while no rank runs. Returns False if a rank does not end within `patience` seconds."""
        self.aborting = True
        for rank in range(self.size):
            if not self.ended[rank]:
                self._batons[rank].release()
                if not self._quiet.acquire(timeout=patience):
                    return False
        return True

    def release_all(self) -> None:
        """Wake all rank threads at once, so that they can end. The threads cannot be used in another run."""
        self.aborting = self.abandoned = True
        for baton in self._batons:
            if baton.locked():
                baton.release()

    # Called by ranks.

    def sleep(self, rank: int) -> None:
        """Block this rank's thread until the next run lets it run."""
        self._batons[rank].acquire()

    def finish(self, rank: int) -> None:
        """End this rank's part in the run, and let another rank run. State that the rank changed in torch is dropped."""
        self.ended[rank] = True
        if not self.abandoned:
            self._save_state()
        if not self.aborting:
            self._pass_on()
        elif self._quiet.locked():
            self._quiet.release()

    def check(self) -> None:
        """Raise `RankAborted` if the run is over, so that the calling rank ends."""
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
        """Let a rank run again, because the event for which it waits has come."""
        self._polls = 0
        self._runnable.append(rank)

    def poll(self, rank: int, pending: Any) -> bool:
        """Let other ranks run. A rank calls this each time it asks whether an event has come; `pending` describes the event.

        Returns False after too many calls without progress; the rank should then wait for the event.
        """
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
        """Record that a rank made a communication call, and count `poll` calls from zero again."""
        self._polls = 0
        self._moves += 1

    def give_up(self, rank: int, pending: Any, mismatch: str) -> None:
        """End the run on all ranks, because this rank's call does not match another rank's call. This method does not return.

        `pending` describes this rank's call, and `mismatch` describes both calls.
        """
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
