"""A rank's process, seen from its owner."""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import tempfile
from dataclasses import dataclass
from typing import IO

from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.rank import RankAddress
from equivcheck.worlds.patience import cpu_seconds

_TAIL = 4000
"""Bytes of a rank's output worth showing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process with what its owner holds of it."""

    rank: int
    """Global rank, from 0."""
    pid: int
    """Process id."""
    channel: Channel
    """Programs go in, values come out."""
    output: IO[bytes]
    """What it printed last."""
    stacks: IO[bytes]
    """Where it writes its stacks when asked."""

    @classmethod
    def of(cls, rank: int, pid: int, channel: Channel) -> Member:
        """With files that have no name, so that none is left behind however this process ends."""
        return cls(rank=rank, pid=pid, channel=channel, output=_appended_file(), stacks=_appended_file())

    def place(self, store: socket.socket, table: IO[bytes], size: int, *, until: float) -> None:
        """Tell it where it belongs; rank 0 gets the listening socket of the store."""
        fds = [self.output.fileno(), self.stacks.fileno(), table.fileno()]
        if self.rank == 0:
            fds.append(store.fileno())
        place = RankAddress(rank=self.rank, size=size, port=store.getsockname()[1])
        self.channel.send(pickle.dumps(place), tuple(fds), until=until)

    def printed(self) -> str:
        """The end of what it printed."""
        fd = self.output.fileno()
        start = max(0, os.fstat(fd).st_size - _TAIL)
        return os.pread(fd, _TAIL, start).decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """What it and those that it has waited for have computed; 0 once it has ended."""
        return cpu_seconds(self.pid)

    def close(self) -> None:
        """Let go of the channel and the files."""
        self.channel.close()
        self.output.close()
        self.stacks.close()


def _appended_file() -> IO[bytes]:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `Member.close`
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
