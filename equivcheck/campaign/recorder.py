"""The case that a worker is checking, where its supervisor can read it after the worker's death."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import IO

from equivcheck.scenario.case import Case
from equivcheck.system.unnamed_file import unnamed_file

_SIZE = 1 << 16
_HEADER = struct.Struct("<QQ")
"""Checks begun, and bytes of the case that follows."""
_COUNT = struct.Struct("<Q")
"""The header's first part."""


class Recorder:
    """One slot in memory shared by two processes; writing costs a pickle and a copy, no system call."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._num_begun = self.num_begun

    @classmethod
    def create(cls) -> Recorder:
        """An empty recorder, gone with the processes that have it open."""
        return cls(unnamed_file(_SIZE))

    @classmethod
    def inherited(cls, fd: int) -> Recorder:
        """The supervisor's recorder in a worker that was started with its file descriptor."""
        return cls(os.fdopen(fd, "r+b"))

    @property
    def fd(self) -> int:
        """To be handed to a worker."""
        return self._file.fileno()

    def begin(self, case: Case) -> None:
        """Record that the check of a case begins; one that does not fit counts, but cannot be read back."""
        payload = pickle.dumps(case, pickle.HIGHEST_PROTOCOL)
        if len(payload) > _SIZE - _HEADER.size:
            payload = b""
        self._num_begun += 1
        self._memory[_HEADER.size : _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self._memory, 0, self._num_begun, len(payload))

    def beat(self) -> None:
        """Show that the worker is alive though it begins no check."""
        self._num_begun += 1
        _COUNT.pack_into(self._memory, 0, self._num_begun)

    @property
    def num_begun(self) -> int:
        """Checks begun so far, and beats: while it rises, the worker is alive."""
        return int(_HEADER.unpack_from(self._memory)[0])

    def last(self) -> Case | None:
        """The case that was begun last; None if there is none, or it did not fit."""
        _, length = _HEADER.unpack_from(self._memory)
        if not length:
            return None
        case: Case = pickle.loads(self._memory[_HEADER.size : _HEADER.size + length])
        return case

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        self._file.close()
