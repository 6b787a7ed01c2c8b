"""Copies of a rank that its program makes by `os.fork`: none may come out of the program as if it were the rank, or outlive it.

A copy has one thread and the rank's open sockets: what it communicates is lost or goes wrong, and what it waits for never comes.
Processes of `multiprocessing` and `subprocess` are no such copies.
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
"""Seconds without any work after which a copy that outlives the program is left running, as `Patience` counts them."""
_MESSAGE = struct.Struct("<?i")
"""What a copy tells: whether it has come out of the program (else that it exists), and its process id."""

_here = threading.local()
_one_copies = threading.RLock()
"""Held while a process is copied: a copy made meanwhile by another rank's thread would keep the pipe of the first open."""


class ProgramForked(EquivCheckError):
    """A copy of the rank came out of the program, or was left running."""


class WatchedForks:
    """Around a rank's program, in the thread that runs it. Raises `ProgramForked` when a copy is no good."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._made: tuple[int, int] = (-1, -1)
        self._copies: list[_Copy] = []
        self._left: list[_Copy] = []
        self._runnable = 0
        self._ways_out: list[int] = []
        """In a copy: pipes to the rank, and to copies that this is a copy of."""

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
        """Before this process is copied."""
        self._made = os.pipe()

    def in_owner(self) -> None:
        """After it has been."""
        os.close(self._made[1])
        self._copies.append(_Copy(self._made[0]))

    def in_copy(self) -> None:
        """The same, in the copy, which says that it exists."""
        os.close(self._made[0])
        self._ways_out.append(self._made[1])
        self._tell(is_out=False)

    def _tell(self, *, is_out: bool) -> None:
        for way in self._ways_out:
            with contextlib.suppress(OSError):
                os.write(way, _MESSAGE.pack(is_out, os.getpid()))

    def _ended(self, *, wait: bool) -> str:
        """End the copies that are left, after a wait if there is one, and say what is wrong with them; empty for nothing."""
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
        told = [f"process {pid} came out of it" for pid in out]
        told += [f"process {pid} was left running and has been ended" for pid in ended]
        return f"the program forked (os.fork): {'; '.join(told)}; allowed are copies that end by os._exit or exec" if told else ""

    def _pids(self) -> set[int]:
        return {pid for copy in self._left for pid in copy.pids}

    def _cpu_seconds(self) -> dict[int, float]:
        return {pid: cpu_seconds(pid) for pid in self._pids()}

    def _num_runnable(self) -> int:
        """Grows with each look at which a copy could run, on a machine that may be too busy to let it."""
        self._runnable += sum(is_runnable(pid) for pid in self._pids())
        return self._runnable


class _Copy:
    """A copy, with its own copies, at the other end of a pipe that is closed when all of them have ended or run exec."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.pids: set[int] = set()
        self.out: set[int] = set()

    def is_left(self) -> bool:
        """Read what it has told; whether any of it may still be there, processes of multiprocessing aside."""
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
