"""Threads of this process in the operating system. Linux only."""

from __future__ import annotations

import os
import threading
import time

_TASKS = "/proc/self/task"
_LOOK_SECONDS = 0.0005
"""Seconds between two tests whether a thread has ended."""


def num_threads() -> int:
    """Number of threads, including threads started by C++."""
    return len(os.listdir(_TASKS))


def wait_for_end_of(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread to end in the operating system, for at most `seconds`.

    `Thread.join` returns when Python is done with the thread. torch frees its thread-local state after that and needs the GIL. If
    the process exits meanwhile, there is no GIL and C++ aborts ("terminate called without an active exception").
    """
    thread.join(seconds)
    place = f"{_TASKS}/{thread.native_id}"
    until = time.monotonic() + seconds
    while not thread.is_alive() and os.path.exists(place) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
