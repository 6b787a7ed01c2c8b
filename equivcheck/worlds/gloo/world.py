"""The gloo world."""

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
from equivcheck.worlds.gloo.crew import Crew
from equivcheck.worlds.gloo.fork_server import FORK_SERVER, START_SECONDS
from equivcheck.worlds.gloo.request import Surroundings, packed, request
from equivcheck.worlds.ranks import Ranks, Run

_ATTEMPTS = 3
"""Attempts to start ranks if a process ends before all have joined."""


class GlooRanks(Ranks):
    """N ranks as processes, started at the first run, kept while runs succeed, and restarted after a failure.

    They are also restarted after a program that replaced functions of torch or changed state that cannot be restored. Ranks get a
    copy of the program, its arguments, and its closure.
    """

    name: ClassVar[str] = "gloo"
    has_copies: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"size {size} is not valid: a gloo world needs a rank. Expected 1 or more.")
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
        task = packed(program, arguments, is_user_code=is_user_code)
        with self._lock:
            return Run(values=self._processes.run(self.size, task, deadline, is_user_code=is_user_code))

    def prepare_to_compile(self) -> None:
        """Compile once in the fork server, if ranks have not been started."""
        with self._lock:
            self._processes.prepare_to_compile()

    def close(self) -> None:
        """End every process; a later run starts new ones."""
        with self._lock:
            self._processes.end()


class _Processes:
    """One world's processes, started on demand."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._crew: Crew | None = None
        self._sent: Surroundings | None = None
        self._uses_server = False

    def run(self, size: int, task: bytes, deadline: float, *, is_user_code: bool) -> tuple[Any, ...]:
        self._leave_to_parent()
        if self._crew is not None and self._crew.disturbed():
            self._dismiss()
        try:
            crew = self._crew or self._hire_in_time(size)
            now = Surroundings.of_owner()
            values = crew.run(request(task, None if now == self._sent else now, is_user_code=is_user_code), deadline)
            self._sent = now
            if crew.is_changed:
                self._dismiss()
            return values
        except BaseException:  # Ctrl-C as well: ranks in the middle of something cannot be used again
            self._dismiss()
            raise

    def prepare_to_compile(self) -> None:
        self._leave_to_parent()
        if self._crew is None:
            self._use_server()
            FORK_SERVER.prepare_to_compile()

    def end(self) -> None:
        self._leave_to_parent()
        self._dismiss()
        if self._uses_server:
            self._uses_server = False
            FORK_SERVER.leave()

    def _hire_in_time(self, size: int) -> Crew:
        """Start the processes, and retry if one ends meanwhile. Raises `RanksDidNotStart`."""
        until = time.monotonic() + START_SECONDS
        for attempt in itertools.count(1):
            try:
                return self._hire(size)
            except RanksLost as error:
                self._dismiss()
                if attempt == _ATTEMPTS or time.monotonic() >= until:
                    raise RanksDidNotStart(f"{error} (tried {attempt} times)") from error
        raise AssertionError

    def _hire(self, size: int) -> Crew:
        self._use_server()
        processes: list[tuple[int, Channel]] = []
        try:
            for _ in range(size):
                processes.append(_fork())
        except BaseException:
            FORK_SERVER.stop(tuple(pid for pid, _ in processes))
            raise
        self._sent = None
        self._crew = Crew(tuple(processes), FORK_SERVER.exit_code)
        self._crew.form()
        return self._crew

    def _use_server(self) -> None:
        if not self._uses_server:
            FORK_SERVER.join()
            self._uses_server = True

    def _dismiss(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            FORK_SERVER.stop(crew.pids)
            crew.close()

    def _leave_to_parent(self) -> None:
        """Forget the processes in a forked copy of this process, because they belong to the parent."""
        if self._owner != os.getpid():
            self._owner, self._uses_server = os.getpid(), False
            if self._crew is not None:
                self._crew.close()
                self._crew = None


def _fork() -> tuple[int, Channel]:
    ours, its = Channel.pair()
    try:
        return FORK_SERVER.fork(its.fileno()), ours
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
