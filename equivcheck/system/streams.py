"""The standard streams of a command, each of which may be closed, full, or read by nobody."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TextIO, cast

from equivcheck.errors import EquivCheckError, UsageError


class OutputFailed(EquivCheckError):
    """What a command has found could not be printed."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """While entered, stdout that fails raises `OutputFailed`, and stderr that fails is silent; both may be closed."""
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
    """Raise `UsageError` where stdout is closed: a command that cannot say what it finds need not look for it."""
    if sys.stdout is None:
        raise UsageError("standard output is closed; allowed: a terminal, a file, a pipe or /dev/null")


def standard_input() -> BinaryIO:
    """The bytes of stdin. Raises `UsageError` where it is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; allowed: a file or a pipe with a scenario")
    return sys.stdin.buffer


def _reserve_numbers() -> None:
    """Open what is closed of the first three file descriptors: the next files would get their numbers, and what is printed."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _restore(stdout: TextIO, stderr: TextIO) -> None:
    sys.stdout, sys.stderr = stdout, stderr


@contextlib.contextmanager
def _writes_anything(stream: TextIO) -> Iterator[None]:
    """While entered, characters that the stream's encoding lacks are written as escapes."""
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
    """A stream that goes nowhere once it has failed: what is left in its buffer would fail again as the process ends."""

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
        """Told of a failure again and again: click swallows the first."""
        if self._error is None:
            try:
                do()
            except OSError as error:
                self._error = error
                _lead_nowhere(self._stream)
        if self._error is not None:
            self._failed(self._error)


def _lead_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # a stream without a file descriptor
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
