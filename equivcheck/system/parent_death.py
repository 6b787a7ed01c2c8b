"""Processes that end with the one that has started them, however suddenly that ends; on Linux, elsewhere nothing is done."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process sent a signal when the thread that started it ends; `parent` is the id of that thread's process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it has ended before
            os.kill(os.getpid(), number)


def tie() -> str:
    """Code of a new interpreter by which it is killed when this thread ends, until it takes that back."""
    return f"from equivcheck.system.parent_death import end_with_parent; end_with_parent({os.getpid()})"


def outlive_parent() -> None:
    """Take that back: from now on the process sees for itself when nobody is left to talk to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def tied(command: Sequence[str]) -> list[str]:
    """A command that is asked to end (SIGTERM) when this thread ends; an interpreter starts it."""
    call = f"from equivcheck.system.parent_death import end_with_parent; end_with_parent({os.getpid()}, {int(signal.SIGTERM)})"
    code = f"import os, sys; sys.path.insert(0, {_ROOT!r}); {call}; "
    return [sys.executable, "-I", "-c", code + "os.execvp(sys.argv[1], sys.argv[1:])", *command]


_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Where this package is found."""
