"""Files without a name, which processes share and which are gone with them."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def unnamed_file(num_bytes: int) -> IO[bytes]:
    """So many zeros, to be mapped: in memory where the system can, as a disk may be full.

    They are written, as a page that has no space yet would end the process that writes to it.
    """
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("equivcheck"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by those who share it
    file.write(bytes(num_bytes))
    file.flush()
    return file
