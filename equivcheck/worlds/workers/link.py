"""The worker's end of its connection to the supervisor."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from equivcheck.system.parent_death import outlive_parent
from equivcheck.system.temporary_folder import clear_own

STACK_SIGNAL = signal.SIGUSR1
"""Signal to make a worker write the stacks of its threads to standard error."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Message to a worker: end after the current task."""


class SupervisorLink:
    """A worker's connection to its supervisor. Create it first in the worker's main thread, which then ignores Ctrl-C.

    A second thread reads messages, so a busy worker also notices a stop or the supervisor's death. If the supervisor ends
    before this thread has started, the system kills the worker.
    """

    def __init__(self, fd: int) -> None:
        faulthandler.enable()
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._connection = Connection(fd)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.task: Any = self._connection.recv()
        """First message, read in the main thread so that its modules are imported there."""
        threading.Thread(target=self._read, name="equivcheck-worker-link", daemon=True).start()
        outlive_parent()

    def send(self, message: object) -> None:
        """Send a message to the supervisor."""
        self._connection.send(message)

    def next(self) -> Any:
        """Wait for the next message and return it. A `Stop` is not returned; it sets `stopped`."""
        return self._inbox.get()

    def pending(self) -> list[Any]:
        """Return all messages that have already arrived, except `Stop`."""
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Stop):
                    self.stopped.set()
                else:
                    self._inbox.put(message)
        except (EOFError, OSError):
            _end()  # nobody is left to tell
        except Exception:
            traceback.print_exc()
            _end()


def _end() -> None:
    clear_own()
    os._exit(1)
