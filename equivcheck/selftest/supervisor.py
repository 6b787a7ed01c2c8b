"""The selftest: every mutant asked for, over several processes, none of which is left behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from equivcheck.mutants.mutant import Mutant
from equivcheck.selftest.examine import Effort
from equivcheck.selftest.row import Row, Selftest
from equivcheck.selftest.worker import MutantDone
from equivcheck.workers.process import Ended, WorkerProcess
from equivcheck.workers.supervision import Interruption, Pool, Stuck
from equivcheck.worlds.patience import Patience, cpu_seconds_of_family

_GRACE_SECONDS = 120.0
"""Beyond what drawing and shrinking may take, for imports and explaining; a process is given up that is idle for as long as all
that, or works for as long without a word (`Patience`)."""

Listener = Callable[[Row, int], None]
"""Called with each complete row, and how many there are with it."""


def selftest(
    mutants: Sequence[Mutant], effort: Effort, *, num_workers: int = 1, listener: Listener = lambda _row, _count: None
) -> Selftest:
    """Examine mutants; the first SIGINT or SIGTERM ends it with what is known by then, the second raises `KeyboardInterrupt`."""
    with Interruption() as interruption:
        return _Supervisor(mutants, effort, listener, interruption).run(num_workers)


class _Examiner(WorkerProcess):
    """One process; it is given one mutant after the other."""

    def __init__(self, effort: Effort) -> None:
        super().__init__("equivcheck.selftest.worker", effort)
        self._limit = effort.seconds + effort.shrink_seconds + _GRACE_SECONDS
        self.row: Row
        """What is known of its mutant so far."""
        self.num_told = 0
        """How often it has said how far it is."""
        self._watch()

    def begin(self, mutant: Mutant) -> None:
        """Let it examine a mutant."""
        self.row = Row.of(mutant)
        self._watch()
        self.send(mutant.name)

    @property
    def is_stuck(self) -> bool:
        """Whether its mutant takes too long, by what the process does."""
        return bool(self.why_stuck)

    @property
    def why_stuck(self) -> str:
        """Why it counts as stuck; empty if it does not."""
        return self._patience.exhausted()

    def _watch(self) -> None:
        self._patience = Patience(self._limit, lambda: cpu_seconds_of_family(self.pid), lambda: self.num_told)


class _Supervisor:
    def __init__(self, mutants: Sequence[Mutant], effort: Effort, listener: Listener, interruption: Interruption) -> None:
        self._mutants, self._effort, self._listener, self._interruption = mutants, effort, listener, interruption
        self._waiting = deque(mutants)
        self._pool = Pool[_Examiner]()
        self._rows: dict[str, Row] = {}

    def run(self, num_workers: int) -> Selftest:
        start = time.monotonic()
        with self._pool as pool:
            for _ in range(min(num_workers, len(self._mutants))):
                self._employ()
            while pool.workers and not self._interruption.requested:
                for examiner, message in pool.messages():
                    self._hear(examiner, message)
        found = {examiner.row.name: examiner.row for examiner in pool.workers} | self._rows
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
            examiner = _Examiner(self._effort)
            self._pool.workers.append(examiner)
            examiner.begin(self._waiting.popleft())

    def _hear(self, examiner: _Examiner, message: object) -> None:
        if isinstance(message, Row):
            examiner.row = message
            examiner.num_told += 1
        elif isinstance(message, MutantDone):
            self._done(message.row)
            self._next(examiner, is_spent=message.is_spent)
        elif isinstance(message, Stuck):
            self._lost(examiner, f"the examination did not end: {examiner.why_stuck}")
        elif isinstance(message, Ended):
            self._lost(examiner, f"the process {examiner.how_it_ended()}")

    def _next(self, examiner: _Examiner, *, is_spent: bool) -> None:
        if self._waiting and not is_spent:
            examiner.begin(self._waiting.popleft())
        else:
            self._pool.remove(examiner)
            self._employ()

    def _done(self, row: Row) -> None:
        self._rows[row.name] = row
        self._listener(row, len(self._rows))

    def _lost(self, examiner: _Examiner, why: str) -> None:
        self._done(replace(examiner.row, broken=why))
        self._pool.remove(examiner)
        self._employ()
