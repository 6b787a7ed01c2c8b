"""Detects processes created with `os.fork` by a rank's program.

Such a process is a copy of the rank, with one thread and with the rank's open sockets. It must not return from the program as if
it were the rank, and must end before the program does. Otherwise its messages would corrupt the rank's, or it would wait forever.
Processes of `multiprocessing` and `subprocess` are not affected.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import struct
import threading
from types import TracebackType
from typing import Self

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.patience import Patience, cpu_seconds, is_runnable

_GRACE = 1.0
"""Seconds without CPU work, measured by `Patience`, after which a surviving copy counts as left running."""
_MESSAGE = struct.Struct("<?i")
"""Message from a copy: whether it returned from the program (otherwise that it exists), and its process id."""

_here = threading.local()
_one_copies = threading.RLock()
"""Lock held during a fork. Otherwise a copy made by another rank's thread would inherit the pipe and keep it open."""


class ProgramForked(EquivCheckError):
    """A rank's program called `os.fork`, and the child process either returned from the program or outlived it."""


class WatchedForks:
    """Context that watches for `os.fork` in a rank's thread while the rank's program runs.

    Raises `ProgramForked` if a child process returns from the program, or still runs after the program's end.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._made: tuple[int, int] = (-1, -1)
        self._copies: list[_Copy] = []
        self._left: list[_Copy] = []
        self._runnable = 0
        self._ways_out: list[int] = []
        """Pipes from a copy to the rank and to the copies in between."""

    def __enter__(self) -> Self:
        _here.watch = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del _here.watch
        if os.getpid() != self._owner:
            self._tell(is_out=True)
            os._exit(0)
        if not self._copies:
            return
        try:
            text = self._ended(wait=error is None)
        finally:
            for copy in self._copies:
                os.close(copy.pipe)
        if text and error is None:
            raise ProgramForked(text)

    def before(self) -> None:
        """Before each fork: open a pipe for reports from the new process."""
        self._made = os.pipe()

    def in_owner(self) -> None:
        """After each fork, in the parent process: keep the pipe's reading end."""
        os.close(self._made[1])
        self._copies.append(_Copy(self._made[0]))

    def in_copy(self) -> None:
        """After each fork, in the new process: report its process id to the parent through the pipe."""
        os.close(self._made[0])
        self._ways_out.append(self._made[1])
        self._tell(is_out=False)

    def _tell(self, *, is_out: bool) -> None:
        for way in self._ways_out:
            with contextlib.suppress(OSError):
                os.write(way, _MESSAGE.pack(is_out, os.getpid()))

    def _ended(self, *, wait: bool) -> str:
        """Wait for remaining copies, kill survivors, and return an error text; empty if all copies ended properly.

        `wait=False` kills at once.
        """
        patience = Patience(_GRACE, self._cpu_seconds, self._num_runnable)
        while left := [copy for copy in self._copies if copy.is_left()]:
            self._left = left
            if all(copy.pids for copy in left) and (not wait or patience.exhausted()):  # each tells at once that it exists
                break
            select.select([copy.pipe for copy in left], [], [], patience.tick)
        for pid in {pid for copy in left for pid in copy.pids}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        out = sorted(pid for copy in self._copies for pid in copy.out)
        ended = sorted({pid for copy in left for pid in copy.pids} - set(out))
        for pid in (*out, *ended):
            with contextlib.suppress(OSError):  # the program has waited for it, or it is a copy of a copy
                os.waitpid(pid, 0)
        told = [f"process {pid} returned from the program" for pid in out]
        told += [f"process {pid} was left running and has been killed" for pid in ended]
        return f"the program forked (os.fork): {'; '.join(told)}. A copy must end by os._exit or exec." if told else ""

    def _pids(self) -> set[int]:
        return {pid for copy in self._left for pid in copy.pids}

    def _cpu_seconds(self) -> dict[int, float]:
        return {pid: cpu_seconds(pid) for pid in self._pids()}

    def _num_runnable(self) -> int:
        """Count observations at which a copy was runnable, even if a busy machine gave it no CPU time."""
        self._runnable += sum(is_runnable(pid) for pid in self._pids())
        return self._runnable


class _Copy:
    """One copy with its own copies. The pipe closes when all copies have ended or called exec."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.pids: set[int] = set()
        self.out: set[int] = set()

    def is_left(self) -> bool:
        """Read new messages from the forked process. Return whether this process, or one that it forked, may still run.

        Processes started by `multiprocessing` are not counted.
        """
        while select.select([self.pipe], [], [], 0)[0]:
            message = os.read(self.pipe, _MESSAGE.size)
            if not message:
                return False
            is_out, pid = _MESSAGE.unpack(message)
            (self.out if is_out else self.pids).add(pid)
        return not self.pids or not self.pids <= _of_multiprocessing()


def _of_multiprocessing() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def _watch() -> WatchedForks | None:
    watch: WatchedForks | None = getattr(_here, "watch", None)
    return watch


def _before() -> None:
    _one_copies.acquire()
    if (watch := _watch()) is not None:
        watch.before()


def _in_owner() -> None:
    if (watch := _watch()) is not None:
        watch.in_owner()
    _one_copies.release()


def _in_copy() -> None:
    _one_copies.release()
    if (watch := _watch()) is not None:
        watch.in_copy()


os.register_at_fork(before=_before, after_in_parent=_in_owner, after_in_child=_in_copy)
