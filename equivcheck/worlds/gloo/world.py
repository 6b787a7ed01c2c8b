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
"""How often ranks are started of which a process ends before all have joined."""


class GlooRanks(Ranks):
    """N ranks as processes: started at the first run, kept while runs succeed, started afresh after one that failed.

    So they are after a program that has left them with what cannot be put back, or has replaced functions of torch. Ranks get a
    copy of the program, its arguments, and what it closes over.
    """

    name: ClassVar[str] = "gloo"
    has_copies: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"gloo: size is {size}; allowed: 1 or more ranks")
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
        is_foreign: bool = True,
    ) -> Run:
        """As `Ranks.run`, on processes, whose schedule nobody chooses; raises `UsageError` when the program cannot be sent."""
        task = packed(program, arguments, is_foreign=is_foreign)
        with self._lock:
            return Run(values=self._processes.run(self.size, task, deadline, is_foreign=is_foreign))

    def prepare_to_compile(self) -> None:
        """Let the process that ranks are forked from compile something, where ranks have not been started."""
        with self._lock:
            self._processes.prepare_to_compile()

    def close(self) -> None:
        """End every process; a later run starts them again."""
        with self._lock:
            self._processes.end()


class _Processes:
    """The processes of one world, now or at some time."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._crew: Crew | None = None
        self._sent: Surroundings | None = None
        self._uses_server = False

    def run(self, size: int, task: bytes, deadline: float, *, is_foreign: bool) -> tuple[Any, ...]:
        self._leave_to_parent()
        if self._crew is not None and self._crew.disturbed():
            self._dismiss()
        try:
            crew = self._crew or self._hire_in_time(size)
            now = Surroundings.of_owner()
            values = crew.run(request(task, None if now == self._sent else now, is_foreign=is_foreign), deadline)
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
        """Hire, and try again where a process ended meanwhile; raises `RanksDidNotStart`."""
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
        """In a forked copy of the process that hired them, they are not ours."""
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
