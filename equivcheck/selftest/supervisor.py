"""The selftest: every mutant asked for, over several processes, none of which is left behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from equivcheck.campaign.interruption import Interruption
from equivcheck.mutants.mutant import Mutant
from equivcheck.selftest.effort import Effort
from equivcheck.selftest.messages import Examined, Growing, Job
from equivcheck.selftest.process import Examiner
from equivcheck.selftest.row import Row, Selftest

_TICK = 0.2
"""Seconds between two looks at the processes."""
_GRACE_SECONDS = 120.0
"""Beyond what drawing and shrinking may take, for imports and explaining; then a process is given up."""

Listener = Callable[[Row, int], None]
"""Called with each complete row, and how many there are with it."""


def selftest(
    mutants: Sequence[Mutant], effort: Effort, *, num_workers: int = 1, listener: Listener = lambda _row, _count: None
) -> Selftest:
    """Examine mutants; the first SIGINT or SIGTERM ends it with what is known by then, the second raises `KeyboardInterrupt`."""
    with Interruption() as interruption:
        return _Supervisor(mutants, effort, listener, interruption).run(num_workers)


class _Supervisor:
    def __init__(self, mutants: Sequence[Mutant], effort: Effort, listener: Listener, interruption: Interruption) -> None:
        self._mutants, self._effort, self._listener, self._interruption = mutants, effort, listener, interruption
        self._waiting = deque(mutants)
        self._examiners: list[Examiner] = []
        self._rows: dict[str, Row] = {}

    def run(self, num_workers: int) -> Selftest:
        start = time.monotonic()
        try:
            for _ in range(min(num_workers, len(self._mutants))):
                self._employ()
            while self._examiners and not self._interruption.requested:
                self._turn()
        finally:
            for examiner in self._examiners:
                examiner.close()
        growing = {examiner.row.name: examiner.row for examiner in self._examiners}
        found = growing | self._rows
        return Selftest(
            rows=tuple(found[mutant.name] for mutant in self._mutants if mutant.name in found),
            asked=len(self._mutants),
            seed=self._effort.seed,
            seconds=time.monotonic() - start,
            interrupted=self._interruption.requested,
        )

    def _employ(self) -> None:
        """A new process for the next mutant, if there is one."""
        if self._waiting:
            self._examiners.append(Examiner())
            self._next_job(self._examiners[-1])

    def _next_job(self, examiner: Examiner) -> None:
        if self._waiting:
            mutant = self._waiting.popleft()
            row = Row(name=mutant.name, family=mutant.family, expected=mutant.causes)
            examiner.begin(Job(name=mutant.name, effort=self._effort), row)
        else:
            self._examiners.remove(examiner)
            examiner.close()

    def _turn(self) -> None:
        links = {examiner.link: examiner for examiner in self._examiners}
        for link in wait(list(links), timeout=_TICK):
            self._hear(links[link])  # type: ignore[index]
        most = self._effort.seconds + self._effort.shrink_seconds + _GRACE_SECONDS
        for examiner in [examiner for examiner in self._examiners if examiner.seconds > most]:
            self._lost(examiner, f"the examination did not end within {most:.0f} s")

    def _hear(self, examiner: Examiner) -> None:
        try:
            message = examiner.link.recv()
        except (EOFError, OSError):
            self._lost(examiner, f"the process {examiner.how_it_ended()}")
            return
        if isinstance(message, Growing):
            examiner.row = message.row
        elif isinstance(message, Examined):
            self._done(message.row)
            self._next_job(examiner)

    def _done(self, row: Row) -> None:
        self._rows[row.name] = row
        self._listener(row, len(self._rows))

    def _lost(self, examiner: Examiner, why: str) -> None:
        self._done(examiner.broken_off(why))
        self._examiners.remove(examiner)
        examiner.close()
        self._employ()
