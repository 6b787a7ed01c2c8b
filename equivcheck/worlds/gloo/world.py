"""World ``gloo``: ranks are processes on this machine."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from equivcheck.errors import UsageError
from equivcheck.worlds.failure import RanksDidNotStart, RanksLost
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.fork_server import FORK_SERVER, START_SECONDS
from equivcheck.worlds.gloo.rank_processes import RankProcesses
from equivcheck.worlds.gloo.request import Surroundings, pickle_task, request
from equivcheck.worlds.ranks import Ranks, Run

_ATTEMPTS = 3
"""Number of attempts to start ranks if a process ends before all have joined."""


class GlooRanks(Ranks):
    """N ranks as processes. The processes start at the first run.

    They stay until a run fails or a program changes torch's state in a process. The next run then starts new processes. Each
    rank gets its own copy of the program, its arguments and its closure.
    """

    name: ClassVar[str] = "gloo"
    has_copies: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"size {size} is not valid: a gloo world needs at least one rank. Expected 1 or more.")
        super().__init__(size)
        self._lock = threading.Lock()
        self._processes = _Processes()
        self._end = weakref.finalize(self, self._processes.end)

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,  # noqa: ARG002
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Implement `Ranks.run` on processes; `schedule_seed` has no effect.

        Raises `UsageError` if the program cannot be pickled.
        """
        task = pickle_task(program, arguments, is_user_code=is_user_code)
        with self._lock:
            return Run(values=self._processes.run(self.size, task, deadline, is_user_code=is_user_code))

    def prepare_to_compile(self) -> None:
        """Call `torch.compile` once in the fork server. Ranks then compile faster. No effect if ranks have already started."""
        with self._lock:
            self._processes.prepare_to_compile()

    def close(self) -> None:
        """End all ranks' processes. A later run starts new ones."""
        with self._lock:
            self._processes.end()


class _Processes:
    """One world's processes, started on demand."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._ranks: RankProcesses | None = None
        self._sent: Surroundings | None = None
        self._uses_server = False

    def run(self, size: int, task: bytes, deadline: float, *, is_user_code: bool) -> tuple[Any, ...]:
        self._forget_in_fork()
        if self._ranks is not None and self._ranks.has_lost_rank():
            self._stop()
        try:
            ranks = self._ranks or self._start_with_retries(size)
            now = Surroundings.of_owner()
            values = ranks.run(request(task, None if now == self._sent else now, is_user_code=is_user_code), deadline)
            self._sent = now
            if ranks.is_changed:
                self._stop()
            return values
        except BaseException:  # Ctrl-C as well: ranks in the middle of something cannot be used again
            self._stop()
            raise

    def prepare_to_compile(self) -> None:
        self._forget_in_fork()
        if self._ranks is None:
            self._use_server()
            FORK_SERVER.prepare_to_compile()

    def end(self) -> None:
        self._forget_in_fork()
        self._stop()
        if self._uses_server:
            self._uses_server = False
            FORK_SERVER.leave()

    def _start_with_retries(self, size: int) -> RankProcesses:
        """Start the processes, and retry if one ends meanwhile. Raises `RanksDidNotStart`."""
        until = time.monotonic() + START_SECONDS
        for attempt in itertools.count(1):
            try:
                return self._start(size)
            except RanksLost as error:
                self._stop()
                if attempt == _ATTEMPTS or time.monotonic() >= until:
                    raise RanksDidNotStart(f"{error} (tried {attempt} times)") from error
        raise AssertionError

    def _start(self, size: int) -> RankProcesses:
        self._use_server()
        processes: list[tuple[int, Channel]] = []
        try:
            for _ in range(size):
                processes.append(_fork())
        except BaseException:
            FORK_SERVER.stop(tuple(pid for pid, _ in processes))
            raise
        self._sent = None
        self._ranks = RankProcesses(tuple(processes), FORK_SERVER.exit_code)
        self._ranks.form()
        return self._ranks

    def _use_server(self) -> None:
        if not self._uses_server:
            FORK_SERVER.join()
            self._uses_server = True

    def _stop(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            FORK_SERVER.stop(ranks.pids)
            ranks.close()

    def _forget_in_fork(self) -> None:
        """Forget the processes in this process's forked copy, because they belong to the parent."""
        if self._owner != os.getpid():
            self._owner, self._uses_server = os.getpid(), False
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None


def _fork() -> tuple[int, Channel]:
    ours, its = Channel.pair()
    try:
        return FORK_SERVER.fork(its.fileno()), ours
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
