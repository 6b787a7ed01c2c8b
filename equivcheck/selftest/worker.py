"""The process that examines one mutant after the other."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from equivcheck.mutants.registry import mutant
from equivcheck.selftest.effort import Effort
from equivcheck.selftest.examine import examine
from equivcheck.selftest.messages import Examined, Growing, Job
from equivcheck.selftest.row import Row

_TELL_SECONDS = 0.2
"""How often a row is sent while it grows."""


class _Worker:
    """Does jobs; a thread reads the connection, so that the supervisor's death is noticed in the middle of one."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._told = 0.0
        threading.Thread(target=self._read, name="equivcheck-selftest-link", daemon=True).start()

    def work(self) -> None:
        """Until nobody is left who would want to know."""
        while True:
            job = self._jobs.get()
            self._link.send(Examined(row=self._row(job.name, job.effort)))

    def _row(self, name: str, effort: Effort) -> Row:
        found = mutant(name)
        row = Row(name=found.name, family=found.family, expected=found.causes)

        def tell(grown: Row) -> None:
            nonlocal row
            row = grown
            self._tell(grown)

        try:
            return examine(found, effort, tell)
        except Exception as error:
            return replace(row, broken=f"{type(error).__name__}: {error}".splitlines()[0])

    def _tell(self, row: Row) -> None:
        if time.monotonic() - self._told >= _TELL_SECONDS or row.shrunk is not None:
            self._told = time.monotonic()
            self._link.send(Growing(row=row))

    def _read(self) -> None:
        try:
            while True:
                self._jobs.put(self._link.recv())
        except (EOFError, OSError):
            os._exit(1)


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Worker(Connection(fd)).work()
