"""Table entry for one piece of state that outlives a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""Value of an entry whose module is not imported; such an entry never counts as changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How to read and restore one piece of process state. It is read after each run, so reading must take only microseconds."""

    name: str
    """Name in docs and messages."""
    read: Callable[[], Any]
    """Called to get a value to compare with ``==``, or `ABSENT`."""
    put: Callable[[Any], object] | None = None
    """Called to restore the value from `read`, or from `copy` if given; None if the state cannot be restored."""
    copy: Callable[[], Any] | None = None
    """Called to get the value for `put`, if `read` returns too little. Called only when `read` returns a new value."""
