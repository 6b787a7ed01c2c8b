"""A process that examines mutants, seen from its supervisor."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from multiprocessing.connection import Pipe

from equivcheck.campaign.starting import how_it_ended, kill, start
from equivcheck.selftest.messages import Job
from equivcheck.selftest.row import Row


class Examiner:
    """One process; it is given one job after the other."""

    def __init__(self) -> None:
        self.link, its = Pipe()
        with its:
            self._process = start("equivcheck.selftest.worker", (its.fileno(),))
        self._began = time.monotonic()
        self.row: Row

    def begin(self, job: Job, row: Row) -> None:
        """Let it examine a mutant; of one that has died that shows when it is read from."""
        self.row, self._began = row, time.monotonic()
        with contextlib.suppress(OSError):
            self.link.send(job)

    @property
    def seconds(self) -> float:
        """Since its job began."""
        return time.monotonic() - self._began

    def how_it_ended(self) -> str:
        """``was killed by SIGSEGV``, ``exited with code 1``."""
        return how_it_ended(self._process)

    def broken_off(self, why: str) -> Row:
        """What is known of its mutant, as it will know no more."""
        return replace(self.row, broken=why)

    def close(self) -> None:
        """End it and what it started."""
        kill(self._process)
        self.link.close()
