"""End a process when its parent ends, even if the parent is killed. On systems other than Linux these functions do nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the system send this process the signal `number` when the thread that started it ends.

    `parent` is the parent's process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it has ended before
            os.kill(os.getpid(), number)


def code_to_end_with_parent(number: int = signal.SIGKILL) -> str:
    """Return Python code that a new interpreter runs first.

    The interpreter then gets the signal `number` when the thread that started it ends. It can call `outlive_parent` to cancel
    this.
    """
    return f"from equivcheck.system.parent_death import end_with_parent; end_with_parent({os.getpid()}, {int(number)})"


def outlive_parent() -> None:
    """Cancel the effect of `end_with_parent` in this process. The process must then notice by itself if its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def command_tied_to_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in a process that gets SIGTERM when the thread that started it ends."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import os, sys; sys.path.insert(0, {root!r}); {code_to_end_with_parent(signal.SIGTERM)}; "
    return [sys.executable, "-I", "-c", code + "os.execvp(sys.argv[1], sys.argv[1:])", *command]
