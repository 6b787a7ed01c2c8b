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
        self._pipe: tuple[int, int] | None = None
        self.num_copies = 0

    def __enter__(self) -> Self:
        _here.watch = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del _here.watch
        if os.getpid() != self._owner:
            self.tell(is_out=True)
            os._exit(0)
        if self._pipe is None:
            return
        try:
            text = self._ended(0.0 if error else _GRACE)
        finally:
            for end in self._pipe:
                os.close(end)
        if text and error is None:
            raise ProgramForked(text)

    def prepare(self) -> None:
        """Before the rank is copied."""
        self._pipe = self._pipe or os.pipe()

    def tell(self, *, is_out: bool) -> None:
        """In a copy: say that it exists, or that it has come out of the program."""
        assert self._pipe is not None
        os.write(self._pipe[1], _MESSAGE.pack(is_out, os.getpid()))

    def _ended(self, grace: float) -> str:
        """Wait for the copies, end those that are left, and say what is wrong with them; empty for nothing."""
        until, out, copies = time.monotonic() + grace, set[int](), set[int]()
        while True:
            for is_out, pid in self._told():
                (out if is_out else copies).add(pid)
            left = {pid for pid in copies - _of_multiprocessing() if not _is_over(pid)}
            if (not left and len(copies) >= self.num_copies) or time.monotonic() >= until:
                break
            time.sleep(_TICK)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        told = [f"process {pid} came out of it" for pid in sorted(out)]
        told += [f"process {pid} was left running and has been ended" for pid in sorted(left - out)]
        return f"the program forked (os.fork): {'; '.join(told)}; allowed are copies that end by os._exit or exec" if told else ""

    def _told(self) -> list[tuple[bool, int]]:
        assert self._pipe is not None
        found = []
        while select.select([self._pipe[0]], [], [], 0)[0]:
            is_out, pid = _MESSAGE.unpack(os.read(self._pipe[0], _MESSAGE.size))
            found.append((is_out, pid))
        return found


def _of_multiprocessing() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def _is_over(pid: int) -> bool:
    """Whether a process has ended; a child is waited for, as nobody else may."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # waited for by the program, or a copy of a copy
        return not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _watch() -> WatchedForks | None:
    watch: WatchedForks | None = getattr(_here, "watch", None)
    return watch


def _before() -> None:
    if (watch := _watch()) is not None:
        watch.prepare()


def _in_rank() -> None:
    if (watch := _watch()) is not None:
        watch.num_copies += 1


def _in_copy() -> None:
    if (watch := _watch()) is not None:
        watch.tell(is_out=False)


os.register_at_fork(before=_before, after_in_parent=_in_rank, after_in_child=_in_copy)
