"""One piece of state that outlives a run, as the tables of it declare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""What is read of an entry whose module is not imported: nothing to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How a piece of state is read and put back. It is compared after each run, so reading takes a few microseconds at most."""

    name: str
    """As the docs and messages call it."""
    read: Callable[[], Any]
    """What it is, to be compared with ``==``, or `ABSENT`."""
    put: Callable[[Any], object] | None = None
    """Makes it again what `read` gave, or what `copy` gave where there is one; None where that cannot be done."""
    copy: Callable[[], Any] | None = None
    """What `put` needs where `read` tells too little. Called only when `read` gives what it has not given before."""
