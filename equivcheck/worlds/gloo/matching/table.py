"""Memory shared by a world's ranks: for each collective, the description from the first rank to issue it."""

from __future__ import annotations

import fcntl
import mmap
import struct
import threading
from typing import IO, NamedTuple

from equivcheck.system.files import unnamed_file

_SLOT = struct.Struct("<12sQ16sIH")
"""Struct for an `Entry` without its text `told`. It ends with the length of the text, and the text follows."""
_SLOT_BYTES = 512
_NUM_SLOTS = 4096
_BYTES = _SLOT_BYTES * _NUM_SLOTS
TOLD_BYTES = _SLOT_BYTES - _SLOT.size
"""Maximum bytes for a call's description."""


class Entry(NamedTuple):
    """One collective call by one rank, as bytes for the shared table."""

    group: bytes
    """Id of the group within the run, 12 bytes."""
    number: int
    """Index among the rank's calls on the group, from 0."""
    agree: bytes
    """Digest of operation, dtypes, root and sizes, 16 bytes. It must be equal on all ranks in the group."""
    rank: int
    """Global rank."""
    told: bytes
    """Description of the call for the error message, at most `TOLD_BYTES` bytes."""


class Table:
    """Table of collective calls in memory shared by all ranks.

    Ranks compare their calls through it, without waiting for each other. The table has a slot for each call, and calls on several
    groups may come in any order. After thousands of calls a slot is used again, and the earlier call is lost. If a slow rank
    makes the lost call later, this call is not compared.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._lock = threading.Lock()

    def enter(self, entry: Entry) -> tuple[int, bytes] | None:
        """Write one rank's call to the table.

        If another rank's call with this number on the group is different, return that rank and the description of its call.
        Otherwise return None.
        """
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
    """Create an empty table as an unnamed file. The system frees it when the last process that uses it ends."""
    return unnamed_file(_BYTES)
