"""Detect imports in progress. Interrupting one leaves a half-imported module and breaks the process for good."""

from __future__ import annotations

import importlib
from typing import Any

_bootstrap: Any = importlib._bootstrap  # Python 3.10 to 3.14


def holds_import_lock(thread: int | None) -> bool:
    """Whether a thread holds a module's import lock, and so is importing.

    Its stack frames would show it too, but walking the frames of a running thread is not safe.
    """
    locks = [reference() for reference in list(_bootstrap._module_locks.values())]
    return any(lock is not None and lock.owner == thread for lock in locks)
