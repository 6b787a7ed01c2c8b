"""Threads of this process: count them, wait for a thread's end, and find out whether a thread imports a module. Linux only."""

from __future__ import annotations

import importlib
import os
import threading
import time
from typing import Any

_TASKS = "/proc/self/task"
_LOOK_SECONDS = 0.0005
"""Seconds between two tests whether a thread has ended."""


def num_threads() -> int:
    """Return how many threads this process has, including threads started by C++."""
    return len(os.listdir(_TASKS))


def wait_for_end_of(thread: threading.Thread, seconds: float) -> None:
    """Wait until the operating system has ended a thread, for at most `seconds`.

    `Thread.join` returns when Python is done with the thread. torch frees its thread-local state after that and needs the GIL. If
    the process exits meanwhile, there is no GIL and C++ aborts ("terminate called without an active exception").
    """
    thread.join(seconds)
    place = f"{_TASKS}/{thread.native_id}"
    until = time.monotonic() + seconds
    while not thread.is_alive() and os.path.exists(place) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


_bootstrap: Any = importlib._bootstrap  # Python 3.10 to 3.14


def holds_import_lock(thread: int | None) -> bool:
    """Whether the thread with this id holds a module's import lock, because it is importing the module.

    An import is also visible in the thread's stack frames, but walking the frames of a running thread is not safe.
    """
    locks = [reference() for reference in list(_bootstrap._module_locks.values())]
    return any(lock is not None and lock.owner == thread for lock in locks)
