"""Temporary folders, removed even if their process is interrupted or killed.

A process locks each of its folders, and the lock ends with the process. The next process that creates a folder, or that ends a
process, removes all unlocked folders.
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
"""Pattern for names from `tempfile.mkdtemp` with this prefix, so that no other folder is ever removed."""
_PROBED_BYTES = 2**16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_own: set[str] = set()
_making = threading.Lock()
"""Lock held while a folder is created and entered in `_own`, and forever once this process is about to end."""


class NoSpace(EquivCheckError):
    """No temporary file can be written, for example because the disk is full. This is no evidence against the scenario."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Create an empty folder, and remove it when the context or the process ends. Raises `NoSpace` if this is not possible."""
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
    """Raise `NoSpace` if no temporary file can be written. Such a failure is no evidence against the scenario."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_PROBED_BYTES))
    except OSError as error:
        if error.errno in _FULL:
            raise _no_space(error) from error


def clear_own() -> None:
    """Remove all temporary folders of this process, before it ends abruptly.

    Afterwards, a thread that tries to create a folder waits until the process ends.
    """
    _making.acquire()
    for folder in tuple(_own):
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> None:
    """Remove temporary folders left by ended processes of this user."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                    try:
                        if os.fstat(lock).st_uid == os.getuid():
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            shutil.rmtree(entry.path, ignore_errors=True)
                    finally:
                        os.close(lock)


@cache
def _clear_at_first_use() -> None:
    clear_abandoned()


def _made() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody can clear it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have removed it before it was locked. Not every file system counts its links, so look it up.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(folder)):
                    return folder, lock
            os.close(lock)


def _no_space(error: OSError) -> NoSpace:
    return NoSpace(f"temporary files cannot be written in {tempfile.gettempdir()} (TMPDIR): {error.strerror or error}")
