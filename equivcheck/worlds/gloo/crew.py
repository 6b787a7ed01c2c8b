"""Processes that have joined one world, and one run on them: send, gather, and on trouble find out what each was doing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from equivcheck.worlds.failure import FailureKind, RanksFailed, RankReport, RankState
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.fork_server import START_SECONDS, RanksDidNotStart
from equivcheck.worlds.gloo.rank import Place, Raised
from equivcheck.worlds.gloo.stacks import ask_for_stacks, awaited, read_stack, sleeps
from equivcheck.worlds.gloo.verdict import failure_of

_GRACE = 1.0
"""Seconds that the others get to finish or raise after a rank has failed."""
_TAIL = 4000
"""Bytes of a dead rank's output that go into its report."""

ExitCode = Callable[[int], int | None]
"""How the process with that id ended: exit code, minus the signal that killed it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's process, seen from its owner."""

    rank: int
    """Global rank, from 0."""
    pid: int
    """Process id."""
    channel: Channel
    """Programs go in, values come out."""
    output: IO[bytes]
    """What it printed last."""
    stacks: IO[bytes]
    """Where it writes its stacks."""


class Crew:
    """Ranks 0 to N-1. A crew on which a run failed is of no use any more: whoever made the processes kills them."""

    def __init__(self, processes: tuple[tuple[int, Channel], ...], exit_code: ExitCode) -> None:
        self._exit_code = exit_code
        self._members = tuple(_member(rank, pid, channel) for rank, (pid, channel) in enumerate(processes))
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
                    self._place(member, store)
            self._threads = tuple(int.from_bytes(member.channel.receive(until=until), "big") for member in self._members)
        except (EOFError, OSError) as error:
            printed = "; ".join(filter(None, (_tail(member).strip() for member in self._members)))
            raise RanksDidNotStart(f"the gloo ranks could not join: {printed or error}") from error

    def disturbed(self) -> bool:
        """Whether a rank has died, or spoken, without being asked."""
        return bool(self._selector.select(0))

    def run(self, request: bytes, deadline: float) -> tuple[Any, ...]:
        """Send every rank the request; their values in rank order. Raises `RanksFailed`."""
        until = time.monotonic() + deadline
        for member in self._members:
            with contextlib.suppress(OSError):  # dead or stopped: seen while gathering
                member.channel.send(request, until=until)
        answers = self._gather(until)
        values: dict[int, Any] = {}
        failed: dict[int, RankReport] = {}
        times: dict[int, float] = {}
        for rank, answer in answers.items():
            self._read(rank, answer, values, failed, times)
        if len(values) == len(self._members):
            return tuple(values[member.rank] for member in self._members)
        raise RanksFailed(self._failure(values, failed, times, deadline))

    def close(self) -> None:
        """Let go of channels and files."""
        self._selector.close()
        for member in self._members:
            member.channel.close()
            member.output.close()
            member.stacks.close()
