"""Shares a worker's current case with its supervisor. The shared memory survives the worker's death."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import IO

from equivcheck.scenario.case import Checkable
from equivcheck.system.files import unnamed_file

_SIZE = 1 << 16
_HEADER = struct.Struct("<QQ")
"""Format of the header: checks begun, and length of the pickled case."""
_COUNT = struct.Struct("<Q")
"""Format of the header's first part, the number of checks begun."""


class Recorder:
    """Shared memory in which a worker records its current case for the supervisor.

    Recording a case needs no system call, only a pickle and a copy.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._num_begun = self.num_begun

    @classmethod
    def create(cls) -> Recorder:
        """Create an empty recorder. Its memory is freed when no process has it open."""
        return cls(unnamed_file(_SIZE))

    @classmethod
    def open_inherited(cls, fd: int) -> Recorder:
        """Open the supervisor's recorder in a worker, by the inherited file descriptor `fd`."""
        return cls(os.fdopen(fd, "r+b"))

    @property
    def fd(self) -> int:
        """File descriptor of the shared memory, to pass to the worker."""
        return self._file.fileno()

    def begin(self, case: Checkable) -> None:
        """Record the start of a check. If the pickled case is too large for the memory, `last_case` returns None."""
        payload = pickle.dumps(case, pickle.HIGHEST_PROTOCOL)
        if len(payload) > _SIZE - _HEADER.size:
            payload = b""
        self._num_begun += 1
        self._memory[_HEADER.size : _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self._memory, 0, self._num_begun, len(payload))

    def beat(self) -> None:
        """Tell the supervisor that the worker is alive, if it works for a long time without beginning a check."""
        self._num_begun += 1
        _COUNT.pack_into(self._memory, 0, self._num_begun)

    @property
    def num_begun(self) -> int:
        """How many checks the worker has begun, plus its calls to `beat`. The number increases while the worker is alive."""
        return int(_HEADER.unpack_from(self._memory)[0])

    def last_case(self) -> Checkable | None:
        """Return the worker's current case; None if there is none, or if it was too large."""
        _, length = _HEADER.unpack_from(self._memory)
        if not length:
            return None
        case: Checkable = pickle.loads(self._memory[_HEADER.size : _HEADER.size + length])
        return case

    def close(self) -> None:
        """Release the shared memory and its file descriptor."""
        self._memory.close()
        self._file.close()
