"""Lets a program announce its stage and step, so that recorded calls carry them. Has no effect if no world listens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from equivcheck.worlds.trace.stage import Stage

Listener = Callable[[Stage, int], None]

_listeners = threading.local()


def listen(listener: Listener) -> None:
    """Register a listener for the calling rank: for its thread in sim, and for its process in other worlds."""
    _listeners.listener = listener


def mark(stage: Stage, step: int) -> None:
    """Tell the listeners which stage and step the calling rank begins. Steps are counted from 0."""
    listener: Listener | None = getattr(_listeners, "listener", None)
    if listener is not None:
        listener(stage, step)
