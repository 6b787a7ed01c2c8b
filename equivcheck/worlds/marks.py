"""How a program tells its world where in a training it is, so that recorded calls know; nothing where nobody listens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from equivcheck.worlds.trace.stage import Stage

Listener = Callable[[Stage, int], None]

_listeners = threading.local()


def listen(listener: Listener) -> None:
    """Let a world hear the marks of the calling rank: of its thread in sim, of its process elsewhere."""
    _listeners.listener = listener


def mark(stage: Stage, step: int) -> None:
    """Say that the calling rank enters a stage of a step, counted from 0."""
    listener: Listener | None = getattr(_listeners, "listener", None)
    if listener is not None:
        listener(stage, step)
