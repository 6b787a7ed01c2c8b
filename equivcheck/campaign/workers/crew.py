"""Interface between a campaign's supervisor and its workers, and worker processes on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.campaign.workers.messages import Broken, Checked, Done, Lost, Spent
from equivcheck.campaign.workers.process import CheckingProcess
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.workers.fork_server import forked_workers
from equivcheck.worlds.workers.process import Ended, worker_environment
from equivcheck.worlds.workers.supervision import Pool, Stuck

_WARMING = "equivcheck.campaign.workers.warming"
_END_SECONDS = 1.0
"""Seconds in which a worker must end after its last message."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A machine in a cluster."""

    name: str
    """Unique name."""
    num_workers: int
    """How many worker processes the machine can run; 0 if it never took part."""
    lost: str = ""
    """Text ``lost: ...`` or ``left out: ...`` with the reason; empty while the machine takes part."""


class Worker(Protocol):
    """Protocol for a worker process, as its supervisor sees it."""

    place: tuple[int, int]
    """Worker number, and how many processes this worker has had before."""
    suspect: CaseVerdict | None
    """A failed verdict to check again in this process; None if the worker draws cases."""
    done: bool
    """Whether the worker has sent its last message."""
    node: str
    """Name of the worker's machine; empty for this machine."""

    def send(self, message: object) -> None:
        """Send a message to the worker. It is dropped if the worker is dead."""


W = TypeVar("W", bound=Worker)


class CampaignWorkers(Protocol[W]):
    """Protocol for all workers of a campaign, as a context manager. The end of the context ends them."""

    workers: list[W]
    """Workers still running."""

    def __enter__(self) -> Self:
        """Start nothing. Workers begin with `start`."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all workers."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Machines in the cluster; empty if workers run on this machine."""

    @property
    def has_room(self) -> bool:
        """Whether a core is free for one more worker."""

    def start(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        """Start a worker, even if no core is free.

        `place` has the worker's number, and how many processes this worker had before. `suspect` is a verdict on a case to check
        again; None if the worker draws cases.
        """

    def messages(self) -> Iterator[tuple[W, Any]]:
        """Wait briefly, and yield each new message with the worker that sent it.

        A worker's last message is `Ended`, `Lost` or `NodeLost`. After it, the worker is no longer in `workers`.
        """

    def remove(self, worker: W) -> None:
        """Kill a worker, and ignore its messages from now on."""


class LocalWorkers(Pool[CheckingProcess]):
    """A campaign's worker processes on this machine.

    If the plan uses the standard check, they are forked from one process after all imports.
    """

    nodes: Sequence[Node] = ()
    has_room = True

    def __init__(self) -> None:
        super().__init__()
        self._forking = contextlib.ExitStack()
        self._forks = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._forking:
            super().__exit__(kind, error, trace)

    def start(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        """Start a worker process.

        `place` has the worker's number, and how many processes this worker had before. `suspect` is a verdict on a case to check
        again; None if the worker draws cases.
        """
        if plan.check is oracle_check and not self._forks:
            self._forks = True
            self._forking.enter_context(forked_workers(_WARMING, worker_environment()))
        self.workers.append(CheckingProcess(plan, place, suspect))

    def messages(self) -> Iterator[tuple[CheckingProcess, Any]]:
        """Wait briefly, and yield each new message with the worker that sent it.

        A worker's last message is `Ended`, or `Lost` if its process died or was stuck.
        """
        for worker, message in super().messages():
            if isinstance(message, Ended | Stuck):
                yield worker, self._ended(worker, message)
            else:
                yield worker, message
                worker.done = worker.done or isinstance(message, Done | Spent | Checked | Broken)

    def _ended(self, worker: CheckingProcess, message: Ended | Stuck) -> Ended | Lost:
        # The supervisor hears `Ended` after a last message, and `Lost` without one.
        last_word: Ended | Lost = Ended()
        if worker.done and isinstance(message, Ended):
            worker.end_within(_END_SECONDS)
        else:
            verdict = worker.hang() if isinstance(message, Stuck) else worker.death()
            last_word = Lost(verdict=verdict, seconds=worker.seconds_since_begun, printed=worker.printed())
        self.remove(worker)
        return last_word
