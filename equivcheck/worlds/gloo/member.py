"""The process of one gloo rank, seen from its parent process."""

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
    """The process of one gloo rank, with the channel and the files for its connection to the parent process."""

    rank: int
    """Global rank, from 0."""
    pid: int
    """Process id."""
    channel: Channel
    """Channel for programs to the rank and return values from it."""
    output: IO[bytes]
    """File with the rank's stdout and stderr."""
    stacks: IO[bytes]
    """File for stacks. The rank writes its threads' stacks into it when it gets a signal."""

    @classmethod
    def of(cls, rank: int, pid: int, channel: Channel) -> Member:
        """Create a `Member` for a started process, with new files for its output and stacks.

        The files have no names, so none is left on the disk if this process is killed.
        """
        return cls(rank=rank, pid=pid, channel=channel, output=_appended_file(), stacks=_appended_file())

    def place(self, store: socket.socket, table: IO[bytes], size: int, *, until: float) -> None:
        """Tell the rank its number, the world size and the store's port, and hand over its files.

        Rank 0 also gets the store's listening socket. Raises `TimeoutError` if `until` (on `time.monotonic`) passes first.
        """
        fds = [self.output.fileno(), self.stacks.fileno(), table.fileno()]
        if self.rank == 0:
            fds.append(store.fileno())
        place = RankAddress(rank=self.rank, size=size, port=store.getsockname()[1])
        self.channel.send(pickle.dumps(place), tuple(fds), until=until)

    def printed(self) -> str:
        """Return the end of the rank's stdout and stderr."""
        fd = self.output.fileno()
        start = max(0, os.fstat(fd).st_size - _TAIL)
        return os.pread(fd, _TAIL, start).decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """Return CPU seconds used by the process and its ended child processes; 0 after the process itself has ended."""
        return cpu_seconds(self.pid)

    def close(self) -> None:
        """Close the channel and the files; the process is not killed."""
        self.channel.close()
        self.output.close()
        self.stacks.close()


def _appended_file() -> IO[bytes]:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed by `Member.close`
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
