"""Turns the results of commands into exit codes, and errors into one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from equivcheck.errors import EquivCheckError, InvalidScenario, UsageError
from equivcheck.system.collection import rare_collections
from equivcheck.system.printable import escape_unprintable, shorten
from equivcheck.system.streams import require_stdout, standard_streams
from equivcheck.system.threads import holds_import_lock
from equivcheck.system.torch_version import OLDEST

LONGEST_LINE = 10_000
"""Maximum characters in an error, because it may quote any input."""
_MACHINE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
)
"""Errors caused by the machine: full, read-only or broken disks, and exhausted resources."""


class ExitCode(IntEnum):
    """Exit code of a command."""

    NOTHING_FOUND = 0
    FINDINGS = 1
    USAGE = 2
    CANNOT_RUN = 3


class Shell(click.Group):
    """The command group `equivcheck`.

    Commands return an `ExitCode`. Errors are printed in one line. A traceback is printed only for a bug in equivcheck.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **extra: Any) -> None:
        """`sections` maps headings in the help to command names. Without it, all commands have one heading."""
        super().__init__(*args, **extra)
        self._sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the help, each with its commands and their short help."""
        sections = self._sections or {"Commands": self.list_commands(ctx)}
        width = max((len(name) for names in sections.values() for name in names), default=0)
        for title, names in sections.items():
            commands = {name: self.commands[name] for name in names}
            with formatter.section(title):
                # One width for all sections keeps their second columns aligned.
                rows = [(name.ljust(width), command.get_short_help_str(formatter.width)) for name, command in commands.items()]
                formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run a command, and end the process with its exit code."""
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
    """Treat SIGTERM as Ctrl-C, so that a command ends the processes that it started and keeps its results."""
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
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
    # An interrupted import of torch aborts the process or swallows the interrupt, so the process ends at once.
    if holds_import_lock(threading.get_ident()):
        os.write(2, b"error: interrupted\n")
        os._exit(ExitCode.CANNOT_RUN)
    raise KeyboardInterrupt


def report(error: Exception) -> ExitCode:
    """Print an error as one line on stderr, and return the exit code for it."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    line = " ".join(_sentence(error).split())
    click.echo(f"error: {shorten(escape_unprintable(line), LONGEST_LINE)}", err=True)
    is_usage = isinstance(error, (click.ClickException, UsageError, InvalidScenario))
    return ExitCode.USAGE if is_usage else ExitCode.CANNOT_RUN


def _sentence(error: Exception) -> str:  # noqa: PLR0911 - one return for each kind of error
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, click.Abort):
        return "interrupted"
    if isinstance(error, EquivCheckError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"torch is not installed. Expected torch {OLDEST} or newer"
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        return f"the machine does not let the checker go on: {error.strerror}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, MemoryError):
        return "out of memory"
    traceback.print_exception(error)  # only a bug in the checker gets here
    return f"{type(error).__name__}: {error} (a bug in the checker)"
