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
import time
from types import TracebackType
from typing import Self

from equivcheck.errors import EquivCheckError

_GRACE = 1.0
"""Seconds that copies get to end by themselves after the program has."""
_TICK = 0.01
_MESSAGE = struct.Struct("<?i")
"""What a copy tells: whether it has come out of the program (else that it exists), and its process id."""

_here = threading.local()


class ProgramForked(EquivCheckError):
    """A copy of the rank came out of the program, or was left running."""


class WatchedForks:
    """Around a rank's program, in the thread that runs it. Raises `ProgramForked` when a copy is no good."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._made: tuple[int, int] = (-1, -1)
        self._copies: list[_Copy] = []
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
            text = self._ended(0.0 if error else _GRACE)
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

    def _ended(self, grace: float) -> str:
        """Wait for the copies, end those that are left, and say what is wrong with them; empty for nothing."""
        until = time.monotonic() + grace
        while left := [copy for copy in self._copies if copy.is_left()]:
            wait = until - time.monotonic()
            if wait <= 0 and all(copy.pids for copy in left):  # each tells at once that it exists
                break
            select.select([copy.pipe for copy in left], [], [], max(wait, _TICK))
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
    if (watch := _watch()) is not None:
        watch.before()


def _in_owner() -> None:
    if (watch := _watch()) is not None:
        watch.in_owner()


def _in_copy() -> None:
    if (watch := _watch()) is not None:
        watch.in_copy()


os.register_at_fork(before=_before, after_in_parent=_in_owner, after_in_child=_in_copy)
