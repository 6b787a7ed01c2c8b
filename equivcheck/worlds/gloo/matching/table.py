"""Memory that the ranks of a crew share: of each collective, what the first rank to come said of it."""

from __future__ import annotations

import fcntl
import mmap
import struct
import threading
from typing import IO, NamedTuple

from equivcheck.system.unnamed_file import unnamed_file

_SLOT = struct.Struct("<12sQ16sIH")
"""An `Entry`, but that of what was said there is the length; it follows."""
_SLOT_BYTES = 512
_NUM_SLOTS = 4096
_BYTES = _SLOT_BYTES * _NUM_SLOTS
TOLD_BYTES = _SLOT_BYTES - _SLOT.size
"""Most that a rank may say of a call."""


class Entry(NamedTuple):
    """One rank's call."""

    group: bytes
    """Tells groups, and runs, apart; 12 bytes."""
    number: int
    """How many calls the rank had issued on the group before."""
    agree: bytes
    """What must be the same of all members; 16 bytes."""
    rank: int
    """Global rank."""
    told: bytes
    """For people; at most `TOLD_BYTES`."""


class Table:
    """Nobody waits for another rank here, so calls on several groups may come in any order.

    A call has one slot; another that falls on the same slot replaces it, and members who come later are not compared with those
    before. That takes thousands of calls that have been issued by some members of their groups and not by others.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._lock = threading.Lock()

    def enter(self, entry: Entry) -> tuple[int, bytes] | None:
        """Enter a rank's call; the first rank to have entered it and what that said if they do not agree, else None."""
        start = (int.from_bytes(entry.group[:4], "little") + entry.number) % _NUM_SLOTS * _SLOT_BYTES
        with self._lock:  # the lock on the file is the process's
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                return self._enter(start, entry)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _enter(self, start: int, entry: Entry) -> tuple[int, bytes] | None:
        group, index, agree, first, length = _SLOT.unpack_from(self._memory, start)
        text = start + _SLOT.size
        if (group, index) == (entry.group, entry.number):
            return None if agree == entry.agree else (first, self._memory[text : text + length])
        self._memory[text : text + len(entry.told)] = entry.told
        _SLOT.pack_into(self._memory, start, *entry[:-1], len(entry.told))
        return None


def table_file() -> IO[bytes]:
    """An empty table, gone with the processes that have it open."""
    return unnamed_file(_BYTES)
