"""A gloo world's processes, and runs on them.

In each run, every rank gets the same request and sends an answer. If the run fails, the failure has a report for each rank.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from equivcheck.worlds.failure import Failure, RankReport, RanksDidNotStart, RanksFailed, RanksLost, RankState, last_line
from equivcheck.worlds.gloo.answer import RAISED_TAG, Content, content, leave_ranks_changed
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.failures import died_report, failure_of, raised_report, unfinished_reports
from equivcheck.worlds.gloo.fork_server import START_SECONDS
from equivcheck.worlds.gloo.matching.guard import MISMATCH_TAG
from equivcheck.worlds.gloo.matching.journal import Mismatch
from equivcheck.worlds.gloo.matching.table import table_file
from equivcheck.worlds.gloo.member import Member
from equivcheck.worlds.patience import Patience

_GRACE = 1.0
"""Seconds for other ranks to finish or raise after a rank has failed."""

Answers = dict[int, bytes | None]
"""Answer of each rank; None if its process ended, and missing if it is still busy."""


class RankProcesses:
    """The processes of ranks 0 to N-1 in one gloo world.

    After a failed run they cannot be used again, and the caller must kill them.
    """

    def __init__(self, processes: tuple[tuple[int, Channel], ...], exit_code: Callable[[int], int | None]) -> None:
        """`processes` are process ids and channels in rank order.

        `exit_code` returns a process's exit code, negative for a signal.
        """
        self._exit_code = exit_code
        self._members = tuple(Member.of(rank, pid, channel) for rank, (pid, channel) in enumerate(processes))
        self.is_changed = False
        """Whether the last program left the ranks unusable for another program."""
        self._threads: tuple[int, ...] = ()
        self._selector = selectors.DefaultSelector()
        for member in self._members:
            self._selector.register(member.channel, selectors.EVENT_READ, member)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in rank order."""
        return tuple(member.pid for member in self._members)

    def form(self) -> None:
        """Connect all processes to one default process group.

        Raises `RanksDidNotStart`, or `RanksLost` if a process ends meanwhile.
        """
        until = time.monotonic() + START_SECONDS
        try:
            with socket.create_server(("127.0.0.1", 0)) as store, table_file() as table:
                for member in self._members:
                    with self._may_be_lost(member):
                        member.place(store, table, len(self._members), until=until)
        except OSError as error:
            raise RanksDidNotStart(f"the gloo ranks could not form a process group: {error}") from error
        threads = self._joined(until)
        self._threads = tuple(threads[member.rank] for member in self._members)

    def _joined(self, until: float) -> dict[int, int]:
        """Wait until every rank has sent its main thread's id."""
        threads: dict[int, int] = {}
        while len(threads) < len(self._members):
            ready = self._selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise RanksDidNotStart(f"the gloo ranks could not form a process group within {START_SECONDS:g} s")
            for key, _ in ready:
                with self._may_be_lost(key.data):
                    threads[key.data.rank] = int.from_bytes(key.data.channel.receive(until=until), "big")
        return threads

    @contextlib.contextmanager
    def _may_be_lost(self, member: Member) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            end = died_report(member, self._exit_code(member.pid))
            how = ": ".join(filter(None, (end.error, last_line(end.stack))))
            raise RanksLost(f"the gloo ranks could not form a process group: rank {member.rank} {how}") from error

    def has_lost_rank(self) -> bool:
        """Whether a process has ended although no run was in progress."""
        return bool(self._selector.select(0))

    def run(self, request: bytes, deadline: float) -> tuple[Any, ...]:
        """Send a request from `gloo.request.request` to all ranks, and return the program's values in rank order.

        Raises `RanksFailed` if a rank raises, dies or hangs. `deadline` is the limit in seconds for `Patience`.
        """
        for member in self._members:
            with contextlib.suppress(OSError):  # dead or stopped: seen while gathering
                member.channel.send(request, until=time.monotonic() + deadline)
        patience = Patience(deadline, lambda: {member.rank: member.cpu_seconds() for member in self._members})
        answers, why = self._gather(patience)
        contents = {rank: content(answer) for rank, answer in answers.items() if answer is not None}
        values = tuple(contents[rank].value for rank in sorted(contents) if contents[rank].raised is None)
        self.is_changed = leave_ranks_changed(answer for answer in answers.values() if answer is not None)
        if len(values) == len(self._members):
            return values
        raise RanksFailed(self._failure(answers, contents, why))

    def _gather(self, patience: Patience) -> tuple[Answers, str | Mismatch]:
        """Wait for all answers, until ranks hang or mismatch (the second value says why), or shortly after the first failure."""
        answers: Answers = {}
        hung, until = "", math.inf
        while len(answers) < len(self._members) and not hung and (left := until - time.monotonic()) > 0:
            hung = patience.exhausted()
            for key, _ in self._selector.select(min(left, patience.tick)):
                rank = key.data.rank
                try:
                    answers[rank] = answer = key.data.channel.receive(until=time.monotonic() + patience.limit)
                except TimeoutError:
                    continue
                except (EOFError, OSError):
                    answers[rank] = answer = None
                    self._selector.unregister(key.fileobj)
                if answer is not None and answer[:1] == MISMATCH_TAG:
                    del answers[rank]
                    return answers, _mismatch(answer)
                if answer is None or answer[:1] == RAISED_TAG:
                    until = min(until, time.monotonic() + _GRACE)
        return answers, hung

    def _failure(self, answers: Answers, contents: dict[int, Content], why: str | Mismatch) -> Failure:
        busy = [member for member in self._members if member.rank not in answers]
        reports = {report.rank: report for report in unfinished_reports(busy, [self._threads[member.rank] for member in busy])}
        times = {}
        for member in self._members:
            content = contents.get(member.rank)
            if content is None and member.rank in answers:
                reports[member.rank] = died_report(member, self._exit_code(member.pid))
            elif content is not None and content.raised is not None:
                reports[member.rank] = raised_report(member.rank, content.raised)
                times[member.rank] = content.raised.when
            elif content is not None:
                reports[member.rank] = RankReport(rank=member.rank, state=RankState.FINISHED)
        return failure_of([reports[member.rank] for member in self._members], times, why)

    def close(self) -> None:
        """Close all ranks' channels and files."""
        self._selector.close()
        for member in self._members:
            member.close()


def _mismatch(answer: bytes) -> Mismatch:
    mismatch: Mismatch = pickle.loads(memoryview(answer)[1:])
    return mismatch
