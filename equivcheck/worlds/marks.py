"""Lets a program announce its stage and step, so that recorded calls carry them. Has no effect if no world listens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from equivcheck.worlds.trace.stage import Stage

Listener = Callable[[Stage, int], None]

_listeners = threading.local()


def listen(listener: Listener) -> None:
    """Make `mark` call `listener` in the calling rank. In ``sim`` a rank is a thread, in other worlds a process."""
    _listeners.listener = listener


def mark(stage: Stage, step: int) -> None:
    """Announce that the calling rank begins this training stage in this step (from 0).

    Communication calls recorded from now on have this stage and step.
    """
    listener: Listener | None = getattr(_listeners, "listener", None)
    if listener is not None:
        listener(stage, step)
