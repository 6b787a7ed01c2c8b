"""The threads of this process as the operating system has them; on Linux alone they can be looked at."""

from __future__ import annotations

import os
import threading
import time

_TASKS = "/proc/self/task"
_LOOK_SECONDS = 0.0005
"""How far apart it is looked whether one has ended."""


def num_threads() -> int:
    """How many there are."""
    return len(os.listdir(_TASKS))


def end_of(thread: threading.Thread, seconds: float) -> None:
    """Wait for the end of a thread, so long at most, and of what libraries keep for it.

    `Thread.join` returns when Python is done with it. What torch keeps for a thread is dropped after that and takes the GIL: in a
    process that ends meanwhile there is none to be had any more, and C++ aborts ("terminate called without an active exception").
    """
    thread.join(seconds)
    place = f"{_TASKS}/{thread.native_id}"
    until = time.monotonic() + seconds
    while not thread.is_alive() and os.path.exists(place) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
