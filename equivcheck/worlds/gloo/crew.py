"""Processes that have joined one world, and one run on them: send, gather, and on trouble find out what each was doing."""

from __future__ import annotations

import contextlib
import math
import pickle
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivcheck.worlds.failure import Failure, RankReport, RanksDidNotStart, RanksFailed, RankState
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.failures import died, failure_of, raised, unfinished
from equivcheck.worlds.gloo.fork_server import START_SECONDS
from equivcheck.worlds.gloo.member import Member
from equivcheck.worlds.gloo.rank import CHANGED_TAG, RAISED_TAG, Raised
from equivcheck.worlds.patience import Patience

_GRACE = 1.0
"""Seconds that the others get to finish or raise after a rank has failed."""

Answers = dict[int, bytes | None]
"""What each rank sent, None when its process ended instead; a rank that is still busy is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    value: Any = None
    raised: Raised | None = None


class Crew:
    """Ranks 0 to N-1. After a failed run it is of no use any more: whoever made the processes kills them."""

    def __init__(self, processes: tuple[tuple[int, Channel], ...], exit_code: Callable[[int], int | None]) -> None:
        """`processes` are ids and channels in rank order; `exit_code` says how one ended, minus the signal that killed it."""
        self._exit_code = exit_code
        self._members = tuple(Member.of(rank, pid, channel) for rank, (pid, channel) in enumerate(processes))
        self.is_changed = False
        """Whether the last program has left ranks in a state in which no other can run."""
        self._threads: tuple[int, ...] = ()
        self._selector = selectors.DefaultSelector()
        for member in self._members:
            self._selector.register(member.channel, selectors.EVENT_READ, member)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in rank order."""
        return tuple(member.pid for member in self._members)

    def form(self) -> None:
        """Make them join one world; raises `RanksDidNotStart`."""
        until = time.monotonic() + START_SECONDS
        try:
            with socket.create_server(("127.0.0.1", 0)) as store:
                for member in self._members:
                    member.place(store, len(self._members), until=until)
            self._threads = tuple(int.from_bytes(member.channel.receive(until=until), "big") for member in self._members)
        except (EOFError, OSError) as error:
            printed = "; ".join(filter(None, (member.printed() for member in self._members)))
            raise RanksDidNotStart(f"the gloo ranks could not join: {printed or error}") from error

    def disturbed(self) -> bool:
        """Whether a rank has died without being asked anything."""
        return bool(self._selector.select(0))

    def run(self, request: bytes, deadline: float) -> tuple[Any, ...]:
        """Send every rank the request; their values in rank order. Raises `RanksFailed`."""
        for member in self._members:
            with contextlib.suppress(OSError):  # dead or stopped: seen while gathering
                member.channel.send(request, until=time.monotonic() + deadline)
        answers, hung = self._gather(Patience(deadline, lambda: {member.rank: member.cpu_seconds() for member in self._members}))
        contents = {rank: _content(answer) for rank, answer in answers.items() if answer is not None}
        values = tuple(contents[rank].value for rank in sorted(contents) if contents[rank].raised is None)
        self.is_changed = any(answer is not None and answer[:1] == CHANGED_TAG for answer in answers.values())
        if len(values) == len(self._members):
            return values
        raise RanksFailed(self._failure(answers, contents, hung))

    def _gather(self, patience: Patience) -> tuple[Answers, str]:
        """Wait for every rank, until they count as hung (then why), or for a short while after the first failure."""
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
                if answer is None or answer[:1] == RAISED_TAG:
                    until = min(until, time.monotonic() + _GRACE)
        return answers, hung

    def _failure(self, answers: Answers, contents: dict[int, _Content], hung: str) -> Failure:
        busy = [member for member in self._members if member.rank not in answers]
        reports = {report.rank: report for report in unfinished(busy, [self._threads[member.rank] for member in busy])}
        times = {}
        for member in self._members:
            content = contents.get(member.rank)
            if content is None and member.rank in answers:
                reports[member.rank] = died(member, self._exit_code(member.pid))
            elif content is not None and content.raised is not None:
                reports[member.rank] = raised(member.rank, content.raised)
                times[member.rank] = content.raised.when
            elif content is not None:
                reports[member.rank] = RankReport(rank=member.rank, state=RankState.FINISHED)
        return failure_of([reports[member.rank] for member in self._members], times, hung)

    def close(self) -> None:
        """Let go of channels and files."""
        self._selector.close()
        for member in self._members:
            member.close()


def _content(answer: bytes) -> _Content:
    """What an answer says; a value that cannot be read here counts as raised by its rank."""
    try:
        read = pickle.loads(memoryview(answer)[1:])
    except Exception as error:
        text = f"{type(error).__name__}: the program returned a value that cannot be read: {error}"
        return _Content(raised=Raised(error=text, stack="", when=time.monotonic()))
    return _Content(raised=read) if answer[:1] == RAISED_TAG else _Content(value=read)
