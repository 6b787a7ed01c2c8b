"""Exit codes, and errors as one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from equivcheck.errors import EquivCheckError, InvalidScenario, UsageError
from equivcheck.system.collection import rare_collections
from equivcheck.system.imports import holds_import_lock
from equivcheck.system.printable import escape_unprintable, shorten
from equivcheck.system.streams import require_stdout, standard_streams
from equivcheck.system.torch_version import OLDEST

LONGEST_LINE = 10_000
"""Characters of an error; what it quotes may be anything."""
_OF_THE_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
)
"""Full, read-only or broken disks, and too little of all else: no bug."""


class ExitCode(IntEnum):
    """What the process says when it ends."""

    NOTHING_FOUND = 0
    FINDINGS = 1
    USAGE = 2
    CANNOT_RUN = 3


class Shell(click.Group):
    """A group whose commands return an `ExitCode` and whose errors are one line; only a bug has a traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run a command and exit."""
        extra["standalone_mode"] = False
        with standard_streams():
            try:
                require_stdout()
                with _sigterm_as_ctrl_c(), rare_collections():
                    code = super().main(args, prog_name, **extra)
                sys.stdout.flush()
            except Exception as error:
                code = report(error)
        sys.exit(int(code or 0))


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let commands that are asked to end clean up as after Ctrl-C: end what they started, and keep what they found."""
    if threading.current_thread() is not threading.main_thread():  # only the main one may say so
        yield
        return
    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, but end at once during an import: torch aborts where its own is interrupted, or goes on."""
    if holds_import_lock(threading.get_ident()):
        os.write(2, b"error: interrupted\n")
        os._exit(ExitCode.CANNOT_RUN)
    raise KeyboardInterrupt


def report(error: Exception) -> ExitCode:
    """Say what went wrong, in a line; the exit code."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    line = " ".join(_sentence(error).split())
    click.echo(f"error: {shorten(escape_unprintable(line), LONGEST_LINE)}", err=True)
    is_usage = isinstance(error, (click.ClickException, UsageError, InvalidScenario))
    return ExitCode.USAGE if is_usage else ExitCode.CANNOT_RUN


def _sentence(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, click.Abort):
        return "interrupted"
    if isinstance(error, EquivCheckError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"torch is not installed; allowed: torch {OLDEST} or newer"
    return _of_the_machine(error) or _of_a_bug(error)


def _of_the_machine(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return f"the machine does not let the checker go on: {error.strerror}{f': {error.filename}' if error.filename else ''}"
    return "out of memory" if isinstance(error, MemoryError) else ""


def _of_a_bug(error: Exception) -> str:
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error} (a bug in the checker)"
