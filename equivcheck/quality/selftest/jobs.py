"""Jobs over several processes, none of which is left behind: what an interruption, or the death of a process, leaves is kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.workers.link import Link
from equivcheck.worlds.workers.process import Ended, WorkerProcess
from equivcheck.worlds.workers.supervision import Interruption, Pool, Stuck

_TELL_SECONDS = 0.2
"""How often a result is sent while it grows."""


class Result(Protocol):
    """What comes of a job; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def broken(self) -> str:
        """Why the job ended early; empty if it did not."""


J = TypeVar("J")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Generic[J, R]):
    """What processes are to do with jobs."""

    module: str
    """Its `main` is run by each process, and serves with `equivcheck.quality.selftest.jobs.serve`."""
    effort: object
    """The same for all jobs; picklable."""
    blank: Callable[[J], R]
    """The result of a job of which nothing is known yet."""
    limit: float
    """Seconds for which a process may be idle, or work, without a word (`Patience`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[R]):
    """What came of all jobs."""

    results: tuple[R, ...]
    """In the order of the jobs; those not begun before an interruption are left out."""
    seconds: float
    """Time of all."""
    interrupted: bool
    """Whether it was stopped before the end."""


def run_jobs(jobs: Sequence[J], work: Work[J, R], *, num_workers: int, listener: Callable[[R, int], None]) -> Outcome[R]:
    """Do all jobs; `listener` gets each complete result, and how many there are with it.

    The first SIGINT or SIGTERM ends it with what is known by then, the second raises `KeyboardInterrupt`.
    """
    with Interruption() as interruption:
        return _Supervisor(jobs, work, listener, interruption).run(num_workers)


class _Process(WorkerProcess, Generic[J, R]):
    """One process; it is given one job after the other."""

    def __init__(self, work: Work[J, R]) -> None:
        super().__init__(work.module, work.effort)
        self._work = work
        self.number = -1
        """Of its job."""
        self.result: R
        """What is known of it so far."""
        self.num_told = 0
        """How often it has said how far it is."""
        self._watch()

    def begin(self, number: int, job: J) -> None:
        """Let it do a job."""
        self.number, self.result = number, self._work.blank(job)
        self._watch()
        self.send(job)

    @property
    def is_stuck(self) -> bool:
        """Whether its job takes too long, by what the process does."""
        return bool(self.why_stuck)

    @property
    def why_stuck(self) -> str:
        """Why it counts as stuck; empty if it does not."""
        return self._patience.exhausted()

    def _watch(self) -> None:
        self._patience = Patience(self._work.limit, lambda: cpu_seconds_of_family(self.pid), lambda: self.num_told)


class _Supervisor(Generic[J, R]):
    def __init__(
        self, jobs: Sequence[J], work: Work[J, R], listener: Callable[[R, int], None], interruption: Interruption
    ) -> None:
        self._work, self._listener, self._interruption = work, listener, interruption
        self._waiting = deque(enumerate(jobs))
        self._pool = Pool[_Process[J, R]]()
        self._results: dict[int, R] = {}

    def run(self, num_workers: int) -> Outcome[R]:
        start = time.monotonic()
        with self._pool as pool:
            for _ in range(min(num_workers, len(self._waiting))):
                self._employ()
            while pool.workers and not self._interruption.requested:
                for process, message in pool.messages():
                    self._hear(process, message)
        found = {process.number: process.result for process in pool.workers} | self._results
        return Outcome(
            results=tuple(found[number] for number in sorted(found)),
            seconds=time.monotonic() - start,
            interrupted=self._interruption.requested,
        )

    def _employ(self) -> None:
        """A new process for the next job, if there is one."""
        if self._waiting:
            process = _Process(self._work)
            self._pool.workers.append(process)
            process.begin(*self._waiting.popleft())

    def _hear(self, process: _Process[J, R], message: Any) -> None:
        if isinstance(message, JobDone):
            self._done(process, message.result)
            self._next(process, is_spent=message.is_spent)
        elif isinstance(message, Stuck):
            self._lost(process, f"it did not end: {process.why_stuck}")
        elif isinstance(message, Ended):
            self._lost(process, f"the process {process.how_it_ended()}")
        else:
            process.result = message
            process.num_told += 1

    def _next(self, process: _Process[J, R], *, is_spent: bool) -> None:
        if self._waiting and not is_spent:
            process.begin(*self._waiting.popleft())
        else:
            self._pool.remove(process)
            self._employ()

    def _done(self, process: _Process[J, R], result: R) -> None:
        self._results[process.number] = result
        self._listener(result, len(self._results))

    def _lost(self, process: _Process[J, R], why: str) -> None:
        self._done(process, replace(process.result, broken=why))
        self._pool.remove(process)
        self._employ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """From the process: the answer to a job. Results that it sends before are not yet complete."""

    result: Any
    """Complete, or with the reason why it is not."""
    is_spent: bool = False
    """Whether a rank that could not be stopped still runs in the process, so that it is of no use any more."""


class _Job:
    """Remembers the result of one job as it grows, and tells the supervisor of it."""

    def __init__(self, result: Any, link: Link) -> None:
        self._result, self._link, self._told = result, link, 0.0

    def complete(self, do: Callable[[Callable[[Any], None]], Any]) -> Any:
        """The whole result, or what is known of it when the job raises."""
        try:
            return do(self._tell)
        except Exception as error:
            return replace(self._result, broken=f"{type(error).__name__}: {error}".splitlines()[0])

    def _tell(self, result: Any) -> None:
        self._result = result
        if time.monotonic() - self._told >= _TELL_SECONDS:
            self._told = time.monotonic()
            self._link.send(result)


def serve(fd: int, do: Callable[[Any, Any, Callable[[Any], None]], Any], blank: Callable[[Any], Any]) -> None:
    """Answer the supervisor at the other end of `fd` until it ends: `do` gets a job, the effort, and whom to tell."""
    link = Link(fd)
    while True:
        job = link.next()
        result = _Job(blank(job), link).complete(partial(do, job, link.task))
        link.send(JobDone(result=result, is_spent=bool(abandoned_threads())))
