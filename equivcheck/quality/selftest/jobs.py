"""Jobs on several processes. Interruptions and dying processes keep the results so far, and leave no process behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from equivcheck.worlds.patience import Patience, cpu_seconds_of_family
from equivcheck.worlds.sim.interruption import abandoned_threads
from equivcheck.worlds.workers.link import SupervisorLink
from equivcheck.worlds.workers.process import Ended, WorkerProcess
from equivcheck.worlds.workers.supervision import Interruption, Pool, Stuck

_TELL_SECONDS = 0.2
"""Seconds between two messages about a growing result."""


class JobResult(Protocol):
    """Protocol for a job's result, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def broken(self) -> str:
        """Return the reason why the job ended early; empty if it did not."""


J = TypeVar("J")
R = TypeVar("R", bound=JobResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan(Generic[J, R]):
    """Settings for the processes that run jobs. A job is, for example, to examine one mutant."""

    module: str
    """Module whose `main` runs in each process, and calls `serve`."""
    effort: object
    """Budget, the same for all jobs; picklable."""
    blank: Callable[[J], R]
    """Function that creates an empty result for a job."""
    limit: float
    """Seconds without a message after which a process counts as stuck, idle or working (`Patience`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResults(Generic[R]):
    """Results from all jobs."""

    results: tuple[R, ...]
    """Results in the order of the jobs, without jobs left out by an interruption."""
    seconds: float
    """Duration in seconds for the whole run."""
    interrupted: bool
    """Whether a signal ended the run early."""


def run_jobs(jobs: Sequence[J], work: JobPlan[J, R], *, num_workers: int, listener: Callable[[R, int], None]) -> JobResults[R]:
    """Run all jobs on `num_workers` processes.

    `listener` gets each complete result, and the number of results until then. The first SIGINT or SIGTERM ends the run with the
    results so far, the second raises `KeyboardInterrupt`.
    """
    with Interruption() as interruption:
        return _Supervisor(jobs, work, listener, interruption).run(num_workers)


class _Process(WorkerProcess, Generic[J, R]):
    """Runs one job after another."""

    def __init__(self, work: JobPlan[J, R]) -> None:
        super().__init__(work.module, work.effort)
        self._work = work
        self.number = -1
        """Current job's index."""
        self.result: R
        """Result so far."""
        self.num_messages = 0
        """Messages about the result."""
        self._watch()

    def begin(self, number: int, job: J) -> None:
        """Start a job."""
        self.number, self.result = number, self._work.blank(job)
        self._watch()
        self.send(job)

    @property
    def is_stuck(self) -> bool:
        """Whether the process counts as stuck, because its job takes too long."""
        return bool(self.why_stuck)

    @property
    def why_stuck(self) -> str:
        """Return the reason why the process counts as stuck; empty if it does not."""
        return self._patience.exhausted()

    def _watch(self) -> None:
        self._patience = Patience(self._work.limit, lambda: cpu_seconds_of_family(self.pid), lambda: self.num_messages)


class _Supervisor(Generic[J, R]):
    def __init__(
        self, jobs: Sequence[J], work: JobPlan[J, R], listener: Callable[[R, int], None], interruption: Interruption
    ) -> None:
        self._work, self._listener, self._interruption = work, listener, interruption
        self._waiting = deque(enumerate(jobs))
        self._pool = Pool[_Process[J, R]]()
        self._results: dict[int, R] = {}

    def run(self, num_workers: int) -> JobResults[R]:
        start = time.monotonic()
        with self._pool as pool:
            for _ in range(min(num_workers, len(self._waiting))):
                self._employ()
            while pool.workers and not self._interruption.requested:
                for process, message in pool.messages():
                    self._hear(process, message)
        found = {process.number: process.result for process in pool.workers} | self._results
        return JobResults(
            results=tuple(found[number] for number in sorted(found)),
            seconds=time.monotonic() - start,
            interrupted=self._interruption.requested,
        )

    def _employ(self) -> None:
        """Start a process for the next job, if there is a job."""
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
            process.num_messages += 1

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
    """Message with a job's final result."""

    result: Any
    """Final result. If it is incomplete, `broken` says why."""
    is_spent: bool = False
    """Whether the process is unusable, because an unstoppable rank still runs there."""


class _Job:
    """Keeps the growing result of a job, and sends it to the supervisor."""

    def __init__(self, result: Any, link: SupervisorLink) -> None:
        self._result, self._link, self._sent_at = result, link, 0.0

    def complete(self, do: Callable[[Callable[[Any], None]], Any]) -> Any:
        """Run the job and return its result. If the job raises, return the result so far."""
        try:
            return do(self._tell)
        except Exception as error:
            return replace(self._result, broken=f"{type(error).__name__}: {error}".splitlines()[0])

    def _tell(self, result: Any) -> None:
        self._result = result
        if time.monotonic() - self._sent_at >= _TELL_SECONDS:
            self._sent_at = time.monotonic()
            self._link.send(result)


def serve(fd: int, do: Callable[[Any, Any, Callable[[Any], None]], Any], blank: Callable[[Any], Any]) -> None:
    """Run a job for each message from the supervisor at the other end of `fd`, and send back the job's result.

    ``do(job, effort, tell)`` runs a job within the budget `effort`, and returns its result. It may pass intermediate results to
    `tell`. ``blank(job)`` creates an empty result.
    """
    link = SupervisorLink(fd)
    while True:
        job = link.next()
        result = _Job(blank(job), link).complete(partial(do, job, link.task))
        link.send(JobDone(result=result, is_spent=bool(abandoned_threads())))
