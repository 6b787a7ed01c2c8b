"""Processes that have joined one world, and one run on them: send, gather, and on trouble find out what each was doing."""

from __future__ import annotations

import contextlib
import pickle
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from equivcheck.worlds.failure import Failure, RanksFailed, RankReport, RankState
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.fork_server import START_SECONDS, RanksDidNotStart
from equivcheck.worlds.gloo.member import Member
from equivcheck.worlds.gloo.postmortem import died, failure_of, raised, unfinished
from equivcheck.worlds.gloo.rank import Raised

_GRACE = 1.0
"""Seconds that the others get to finish or raise after a rank has failed."""

Gone = type(None)
Answers = dict[int, bytes | None]
"""What each rank sent, None when its process ended instead; a rank that is still busy is missing."""


class Crew:
    """Ranks 0 to N-1. After a failed run it is of no use any more: whoever made the processes kills them."""

    def __init__(self, processes: tuple[tuple[int, Channel], ...], exit_code: Callable[[int], int | None]) -> None:
        """`processes` are ids and channels in rank order; `exit_code` says how one ended, minus the signal that killed it."""
        self._exit_code = exit_code
        self._members = tuple(Member.of(rank, pid, channel) for rank, (pid, channel) in enumerate(processes))
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
        until = time.monotonic() + deadline
        for member in self._members:
            with contextlib.suppress(OSError):  # dead or stopped: seen while gathering
                member.channel.send(request, until=until)
        answers = self._gather(until)
        contents = {rank: _content(answer) for rank, answer in answers.items() if answer is not None}
        values = tuple(contents[rank][0] for rank in sorted(contents) if not isinstance(contents[rank], Raised))
        if len(values) == len(self._members):
            return values
        raise RanksFailed(self._failure(answers, contents, deadline))

    def close(self) -> None:
        """Let go of channels and files."""
        self._selector.close()
        for member in self._members:
            member.close()
