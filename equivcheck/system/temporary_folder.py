"""Folders for a while, none of which is left: not after an interruption, nor after the sudden end of the process that made one.

A process has a lock on each of its folders, which ends with it however it ends. What nobody has locked is cleared by the next
process that makes a folder, or that ends one which may have left some.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import cache

from equivcheck.errors import EquivCheckError

_PREFIX = "equivcheck-temporary-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` names them: nobody else's folder is to be cleared."""
_PROBED_BYTES = 2**16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_own: set[str] = set()
_making = threading.Lock()
"""Held from before a folder is made until it is in `_own`, and for good once this process is about to end."""


class NoSpace(EquivCheckError):
    """Nothing can be written where temporary files are kept, which says nothing about a scenario."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """An empty folder until the end of the context, or of the process. Raises `NoSpace` where none can be made."""
    _clear_at_first_use()
    try:
        with _making:
            folder, lock = _made()
            _own.add(folder)
    except OSError as error:
        raise _no_space(error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _own.discard(folder)
        os.close(lock)


def require_space() -> None:
    """Raise `NoSpace` where no more temporary files can be written: what failed for that says nothing about a scenario."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_PROBED_BYTES))
    except OSError as error:
        if error.errno in _FULL:
            raise _no_space(error) from error


def clear_own() -> None:
    """Before this process ends at once: remove its folders. Its other threads make no more: who tries waits for the end."""
    _making.acquire()
    for folder in tuple(_own):
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> None:
    """Remove the folders of this user's processes that have ended."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                _clear(entry.path)


@cache
def _clear_at_first_use() -> None:
    clear_abandoned()


def _made() -> tuple[str, int]:
    """A folder and its locked file descriptor; another process may have cleared it before it was locked."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody can clear it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _clear(folder: str) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _no_space(error: OSError) -> NoSpace:
    return NoSpace(f"temporary files cannot be written in {tempfile.gettempdir()} (TMPDIR): {error.strerror or error}")
