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
"""Number of bytes shown from a rank's last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's process, with its channel and files."""

    rank: int
    """Global rank, from 0."""
    pid: int
    """Process id."""
    channel: Channel
    """Channel for programs and values."""
    output: IO[bytes]
    """File with the rank's output."""
    stacks: IO[bytes]
    """File to which the rank writes its stacks on request."""

    @classmethod
    def of(cls, rank: int, pid: int, channel: Channel) -> Member:
        """Return a member with unnamed files, so that no file is left behind if this process ends."""
        return cls(rank=rank, pid=pid, channel=channel, output=_appended_file(), stacks=_appended_file())

    def place(self, store: socket.socket, table: IO[bytes], size: int, *, until: float) -> None:
        """Send the rank its address. Rank 0 also gets the store's listening socket."""
        fds = [self.output.fileno(), self.stacks.fileno(), table.fileno()]
        if self.rank == 0:
            fds.append(store.fileno())
        place = RankAddress(rank=self.rank, size=size, port=store.getsockname()[1])
        self.channel.send(pickle.dumps(place), tuple(fds), until=until)

    def printed(self) -> str:
        """Return the rank's last output."""
        fd = self.output.fileno()
        start = max(0, os.fstat(fd).st_size - _TAIL)
        return os.pread(fd, _TAIL, start).decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds for the process and its reaped children; 0 after it has ended."""
        return cpu_seconds(self.pid)

    def close(self) -> None:
        """Close the channel and the files."""
        self.channel.close()
        self.output.close()
        self.stacks.close()


def _appended_file() -> IO[bytes]:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `Member.close`
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
