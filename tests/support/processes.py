"""Whether processes still run, told from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

_PATIENCE = 120.0
"""Seconds that a machine may take, however loaded, to do what takes none: a kill is done when the process is next scheduled."""


def children_of(pid: int) -> list[int]:
    """The processes that the main thread of a process has started and not waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]


def what_it_does(pid: int) -> tuple[str, ...]:
    """The state of each thread of a process, and where in the kernel it waits, to show in a failure."""
    with contextlib.suppress(OSError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return tuple((task / "stat").read_text("utf-8")[:40] + " " + (task / "wchan").read_text("utf-8") for task in tasks)
    return (f"{pid} has ended",)


def soon(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + _PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def end_soon(*pids: int) -> bool:
    """Whether all of some processes end in time."""
    return soon(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    """One that nobody has waited for does not run, unless one of its threads still ends."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
