"""Standard streams. They may be closed, full, or read by nobody."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TextIO, cast

from equivcheck.errors import EquivCheckError, UsageError


class OutputFailed(EquivCheckError):
    """A command's output could not be written to stdout."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Inside this context, a failed write to stdout raises `OutputFailed`, and a failed write to stderr is ignored.

    This also works if the process started with closed streams.
    """
    _reserve_numbers()
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as undo:
        undo.callback(_restore, *before)
        if sys.stderr is None:
            sys.stderr = undo.enter_context(open(os.devnull, "w", encoding="utf-8"))
        sys.stderr = cast("TextIO", _Guarded(sys.stderr, lambda _error: None))
        if sys.stdout is not None:
            undo.enter_context(_writes_anything(sys.stdout))
            sys.stdout = cast("TextIO", _Guarded(sys.stdout, _raise_failed))
        yield


def require_stdout() -> None:
    """Raise `UsageError` if stdout is closed, because a command could then not print its result."""
    if sys.stdout is None:
        raise UsageError("standard output is closed. Expected a terminal, a file, a pipe or /dev/null.")


def standard_input() -> BinaryIO:
    """Return stdin as a binary stream. Raises `UsageError` if stdin is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed. Expected a file or a pipe with a scenario.")
    return sys.stdin.buffer


def _reserve_numbers() -> None:
    """Open the file descriptors 0, 1 and 2 if they are closed.

    Otherwise the next file would get such a number and receive the output.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _restore(stdout: TextIO, stderr: TextIO) -> None:
    sys.stdout, sys.stderr = stdout, stderr


@contextlib.contextmanager
def _writes_anything(stream: TextIO) -> Iterator[None]:
    """Write characters that the stream's encoding does not have as escapes, inside this context."""
    reconfigure = getattr(stream, "reconfigure", lambda **_options: None)
    before = stream.errors
    reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        reconfigure(errors=before)


def _raise_failed(error: OSError) -> None:
    raise OutputFailed(f"standard output cannot be written: {error.strerror or error}") from error


class _Guarded:
    """Stream that discards output after its first failure, because flushing the rest at exit would fail again."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, do: Callable[[], object]) -> None:
        """Call `do`, and report a failure at every later call too, because click swallows the first one."""
        if self._error is None:
            try:
                do()
            except OSError as error:
                self._error = error
                nowhere = os.open(os.devnull, os.O_WRONLY)
                with contextlib.suppress(OSError):  # a stream without a file descriptor
                    os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        if self._error is not None:
            self._failed(self._error)
