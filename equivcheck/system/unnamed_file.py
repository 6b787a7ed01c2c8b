"""Files without a name, shared by processes and gone when they end."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def unnamed_file(num_bytes: int) -> IO[bytes]:
    """Create a file with this many zero bytes for mapping, in memory if the system supports it.

    The zeros are written because touching a page without disk space would kill the process.
    """
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("equivcheck"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by those who share it
    file.write(bytes(num_bytes))
    file.flush()
    return file
