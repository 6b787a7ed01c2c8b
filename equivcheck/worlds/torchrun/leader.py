"""Rank 0's process: sends programs to every process, including its own, and gathers the answers."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, TypeVar

from equivcheck.errors import EquivCheckError
from equivcheck.worlds.failure import Failure, RankReport, RanksFailed, RankState
from equivcheck.worlds.gloo.answer import RAISED_TAG, Content, content
from equivcheck.worlds.gloo.failures import failure_of, raised_report
from equivcheck.worlds.patience import Patience
from equivcheck.worlds.torchrun.links import LOST, Link, send_message
from equivcheck.worlds.torchrun.place import Place
from equivcheck.worlds.torchrun.rank_thread import RankThread

T = TypeVar("T")
_GRACE = 1.0
"""Seconds for other ranks to finish or raise after a rank has failed."""
_REPORT_SECONDS = 5.0
"""Seconds for other ranks to report their stacks."""


class Leader:
    """Rank 0's process, which sends programs to all ranks.

    After a failed run it refuses further runs, because it cannot restart torchrun's processes.
    """

    def __init__(self, place: Place, links: Mapping[int, Link], hosts: Mapping[int, str], thread: RankThread) -> None:
        self.place, self.thread = place, thread
        self._hosts = dict(hosts)
        self._links = dict(links)
        self._ranks: dict[Any, int] = {link: rank for rank, link in links.items()} | {thread.answers: 0}
        self._cpu = dict.fromkeys(range(place.size), 0.0)
        self._leads = False
        self._unusable: EquivCheckError | None = None

    @property
    def is_usable(self) -> bool:
        """Whether another program can run, because no earlier run has failed."""
        return self._unusable is None

    def do(self, work: Callable[[], T]) -> T:
        """Call `work`, and send its result or exception to all other ranks. `work` may run programs on all ranks."""
        if self._leads:
            return work()
        self._leads = True
        try:
            value = work()
        except BaseException as error:
            self._end(None, error)
            raise
        else:
            self._end(value, None)
            return value
        finally:
            self._leads = False

    def run(self, request: bytes, deadline: float) -> tuple[Any, ...]:
        """Run the program in a request from `request_task` on all ranks, and return its values in rank order.

        Raises `RanksFailed` if a rank raises, dies or hangs. Each later call raises this error again.
        """
        if self._unusable is not None:
            raise self._unusable
        self._unusable = EquivCheckError("world torchrun: a run was interrupted, and its processes cannot be started afresh")
        patience = Patience(deadline, lambda: dict(self._cpu))
        for link in self._links.values():
            send_message(link, "run", (request, patience.tick))
        self.thread.start(request)
        answers, why = self._gather(patience)
        contents = {rank: content(answered) for rank, answered in answers.items() if answered is not None}
        values = tuple(contents[rank].value for rank in sorted(contents) if contents[rank].raised is None)
        if len(values) < self.place.size:
            self._unusable = RanksFailed(failure_of_hosts(answers, contents, self._reports(answers), why, self._hosts))
            raise self._unusable
        self._unusable = None
        return values

    def close(self) -> None:
        """Close the connections to the other ranks."""
        for link in self._links.values():
            link.close()

    def _gather(self, patience: Patience) -> tuple[Answers, str]:
        """Wait for all answers, until ranks hang (the second value says why) or shortly after the first failure."""
        answers: Answers = {}
        hung, until = "", math.inf
        while len(answers) < self.place.size and not hung and (left := until - time.monotonic()) > 0:
            self._cpu[0] = self.thread.cpu_seconds()
            hung = patience.exhausted()
            for rank, verb, payload in self._heard(answers, min(left, patience.tick)):
                if verb == "cpu":
                    self._cpu[rank] = payload
                elif verb == "answer":
                    answers[rank] = payload
                    if payload is None or payload[:1] == RAISED_TAG:
                        until = min(until, time.monotonic() + _GRACE)
        return answers, hung

    def _heard(self, answers: Answers, seconds: float) -> list[tuple[int, str, Any]]:
        """Return messages from ranks without an answer; a lost rank gets the answer None."""
        awaited = [end for end, rank in self._ranks.items() if rank not in answers]
        heard = []
        for end in wait(awaited, seconds):
            rank = self._ranks[end]
            try:
                verb, payload = self._links[rank].recv() if rank else ("answer", self.thread.receive())
            except LOST:
                verb, payload = "answer", None
            heard.append((rank, verb, payload))
        return heard

    def _reports(self, answers: Answers) -> dict[int, Any]:
        """Return reports from ranks without an answer, if their processes send them."""
        reports = {} if 0 in answers else {0: self.thread.report()}
        asked = {rank for rank, link in self._links.items() if rank not in answers and send_message(link, "report")}
        settled: Answers = dict(answers) | dict.fromkeys(reports)
        until = time.monotonic() + _REPORT_SECONDS
        while asked - settled.keys() and (left := until - time.monotonic()) > 0:
            for rank, verb, payload in self._heard(settled, left):
                if verb == "report":
                    reports[rank] = payload
                if verb in ("report", "answer"):  # an answer that comes too late
                    settled[rank] = None
        return reports

    def _end(self, value: Any, error: BaseException | None) -> None:
        for link in self._links.values():
            send_message(link, "end", (*_sendable(value, error), self.is_usable))


def _sendable(value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
    """Return the outcome in a form that can be pickled."""
    try:
        pickle.loads(pickle.dumps((value, error)))
    except Exception as why:
        text = f"{type(error).__name__}: {error}" if error is not None else f"its result cannot be pickled: {why}"
        return None, EquivCheckError(f"world torchrun: rank 0 has ended with {text}")
    return value, error


Answers = dict[int, bytes | None]
"""Answer of each rank; None if the rank was lost, and missing if it is still busy."""
LOST_TEXT = "was lost: its process has ended (see torchrun's output) or its host is gone"
"""Error text of a rank whose connection has ended."""


def failure_of_hosts(
    answers: Answers, contents: Mapping[int, Content], busy: Mapping[int, RankReport], why: str, hosts: Mapping[int, str]
) -> Failure:
    """Build the `Failure` for a run on several hosts. It names the host of the rank that failed first.

    `contents` has the decoded answers, and `busy` has reports on ranks without an answer. `why` is the reason for stopping
    these ranks.
    """
    reports = [_report(rank, answers, contents.get(rank), busy.get(rank)) for rank in sorted(hosts)]
    times = {rank: place for place, rank in enumerate(answers)}  # clocks of hosts differ: in the order in which answers came
    failure = failure_of(reports, times, why)
    where = _where(failure, hosts)
    return replace(failure, summary=f"{failure.summary} ({where})", remark=where)


def _report(rank: int, answers: Answers, said: Content | None, busy: RankReport | None) -> RankReport:
    if said is not None and said.raised is not None:
        return raised_report(rank, said.raised)
    if said is not None:
        return RankReport(rank=rank, state=RankState.FINISHED)
    if rank in answers:
        return RankReport(rank=rank, state=RankState.DIED, error=LOST_TEXT)
    return busy or RankReport(rank=rank, state=RankState.RUNNING)


def _where(failure: Failure, hosts: Mapping[int, str]) -> str:
    """Return the host with the first failed rank, or all hosts."""
    if failure.first is not None:
        return f"on host {hosts[failure.first]}"
    names = dict.fromkeys(hosts.values())
    return "; ".join(f"on host {name}: {', '.join(str(rank) for rank in hosts if hosts[rank] == name)}" for name in names)
