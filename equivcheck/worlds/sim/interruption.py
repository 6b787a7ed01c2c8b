"""Stops rank threads that still run after their run was stopped, and remembers those that cannot be stopped."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable

from equivcheck.system.threads import holds_import_lock

_POLL_SECONDS = 0.02

_abandoned: set[threading.Thread] = set()


def is_importing(thread: threading.Thread) -> bool:
    """Whether a thread is inside an import."""
    return holds_import_lock(thread.ident)


def interrupt(thread: threading.Thread, error: type[BaseException], import_seconds: float) -> None:
    """Raise `error` in a thread at its next Python instruction. If the thread is importing a module, wait until the import ends.

    An interrupted import would break the module for the whole process. If the import takes longer than `import_seconds`, nothing
    is raised.
    """
    until = time.monotonic() + import_seconds
    while thread.is_alive():
        if not is_importing(thread):
            _raise_in(thread, error)
            if not is_importing(thread):
                return
            _raise_in(thread, None)  # it began to import in between
        if time.monotonic() > until:
            return
        thread.join(_POLL_SECONDS)


def _raise_in(thread: threading.Thread, error: type[BaseException] | None) -> None:
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)


def abandon(threads: Iterable[threading.Thread]) -> None:
    """Add threads that could not be stopped to the list for `abandoned_threads`, and remove ended threads from it."""
    _abandoned.update(threads)
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])


def abandoned_threads() -> tuple[str, ...]:
    """Return the names of rank threads that could not be stopped and still run.

    Such threads may change state shared with later runs.
    """
    return tuple(sorted(thread.name for thread in _abandoned if thread.is_alive()))
