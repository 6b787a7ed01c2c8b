"""One piece of process state, such as a global setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""Value of an entry whose module is not imported; such an entry never counts as changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How to read and restore one piece of process state, such as a global setting.

    `read` runs after each run, so it must take only microseconds.
    """

    name: str
    """Name for the docs and for messages."""
    read: Callable[[], Any]
    """Returns the current value, for comparison with ``==``; `ABSENT` if the state does not exist yet."""
    put: Callable[[Any], object] | None = None
    """Restores a value from `read`, or from `copy` if there is a `copy`. None if the state cannot be restored.
    """
    copy: Callable[[], Any] | None = None
    """Returns the value for `put`, if `read` returns too little to restore the state. Called only when `read` returns a new
    value.
    """
