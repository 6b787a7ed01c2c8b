"""Where the workers of a campaign are, and how its supervisor speaks to them: processes of this machine, or those of others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from equivcheck.campaign.messages import Broken, Checked, Done, Lost, Spent
from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.campaign.process import CheckingProcess
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.worlds.workers.fork_server import forked_workers
from equivcheck.worlds.workers.process import Ended, worker_environment
from equivcheck.worlds.workers.supervision import Pool, Stuck

_WARMING = "equivcheck.campaign.warming"
_END_SECONDS = 1.0
"""How long a worker may take to end after its last word."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One machine of several."""

    name: str
    """Unlike that of any other."""
    num_workers: int
    """Worker processes that it has room for; 0 if it never took part."""
    lost: str = ""
    """``lost: ...`` or ``left out: ...`` with the reason; empty while it takes part."""


class Worker(Protocol):
    """A worker as its supervisor sees it."""

    place: tuple[int, int]
    """Its number, and how many processes it has had before."""
    suspect: CaseVerdict | None
    """What it is to check again, alone; None if it draws."""
    done: bool
    """Whether it has said its last word."""
    node: str
    """The machine that it is on; empty for this one."""

    def send(self, message: object) -> None:
        """Say something; to a worker that has died it is lost."""


W = TypeVar("W", bound=Worker)


class Crew(Protocol[W]):
    """Workers; when it is left, none of them is left behind."""

    workers: list[W]
    """Those that have not come to their end."""

    def __enter__(self) -> Self:
        """Use it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all of them."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The machines that they are on; none for this one alone."""

    @property
    def has_room(self) -> bool:
        """Whether one more would find a core."""

    def start(self, plan: Plan, place: tuple[int, int], suspect: CaseVerdict | None = None) -> None:
        """Start one more, whether or not there is room."""

    def messages(self) -> Iterator[tuple[W, Any]]:
        """What they say within a moment, and last `Ended`, `Lost` or `NodeLost`: such a worker is no longer one of the crew."""

    def remove(self, worker: W) -> None:
        """Kill one; it says nothing more."""


class LocalCrew(Pool[CheckingProcess]):
    """Processes of this machine, forked from one where that can be and the check is the usual one."""

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
        """Start a process."""
        if plan.check is oracle_check and not self._forks:
            self._forks = True
            self._forking.enter_context(forked_workers(_WARMING, worker_environment()))
        self.workers.append(CheckingProcess(plan, place, suspect))

    def messages(self) -> Iterator[tuple[CheckingProcess, Any]]:
        """See `Crew`."""
        for worker, message in super().messages():
            if isinstance(message, Ended | Stuck):
                yield worker, self._ended(worker, message)
            else:
                yield worker, message
                worker.done = worker.done or isinstance(message, Done | Spent | Checked | Broken)

    def _ended(self, worker: CheckingProcess, message: Ended | Stuck) -> Ended | Lost:
        """What is to be told of a worker that is no longer part of the crew."""
        last_word: Ended | Lost = Ended()
        if worker.done and isinstance(message, Ended):
            worker.end_within(_END_SECONDS)
        else:
            verdict = worker.hang() if isinstance(message, Stuck) else worker.death()
            last_word = Lost(verdict=verdict, seconds=worker.seconds_since_begun, printed=worker.printed())
        self.remove(worker)
        return last_word
