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
    """One rank's entry for a collective call."""

    group: bytes
    """12 bytes as an id for the group and the run."""
    number: int
    """Index among the rank's calls on the group, from 0."""
    agree: bytes
    """16-byte digest, equal on all members."""
    rank: int
    """Global rank."""
    told: bytes
    """Description for the error text, at most `TOLD_BYTES`."""


class Table:
    """Table of collective calls in shared memory. Ranks use it to notice different calls without waiting for each other.

    Calls on several groups may come in any order. Each call has one slot. If another call replaces a slot's call, later members
    are not compared with earlier members. This only happens after thousands of calls without answers from some members.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._lock = threading.Lock()

    def enter(self, entry: Entry) -> tuple[int, bytes] | None:
        """Write a rank's call into the table.

        If an earlier rank made a different call, return that rank and its description, otherwise None.
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
    """Create an empty table in an unnamed file, which disappears with its last process."""
    return unnamed_file(_BYTES)
