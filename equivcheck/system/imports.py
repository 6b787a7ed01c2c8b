"""Whether an import is under way, which must not be interrupted: a module half imported breaks its process for good."""

from __future__ import annotations

import importlib
from typing import Any

_bootstrap: Any = importlib._bootstrap  # Python 3.10 to 3.14


def imports(thread: int | None) -> bool:
    """Whether the thread of an id imports a module, whose lock it then has.

    Its frames would tell as well, but those of a thread that goes on meanwhile cannot be walked safely.
    """
    locks = [reference() for reference in list(_bootstrap._module_locks.values())]
    return any(lock is not None and lock.owner == thread for lock in locks)
