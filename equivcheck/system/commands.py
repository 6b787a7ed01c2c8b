"""Run commands with a time limit, and end all their child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from equivcheck.system.parent_death import command_tied_to_parent

_END_SECONDS = 15.0
"""Seconds between SIGTERM and SIGKILL. torchrun needs this time to end its ranks, because the ranks run in their own sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCommand:
    """Exit code and output of a command that has ended."""

    code: int | None
    """Exit code, negative for a signal; None if the command was ended at the time limit."""
    printed: str
    """The command's output on stdout."""
    errors: str
    """The command's output on stderr."""

    @property
    def last_line(self) -> str:
        """Return the last line on stderr, or on stdout if stderr is empty.

        If the command failed, this line usually names the error.
        """
        lines = (self.errors.strip() or self.printed.strip()).splitlines()
        return lines[-1].strip() if lines else ""


def run(command: Sequence[str], *, seconds: float | None, environment: Mapping[str, str]) -> FinishedCommand:
    """Run a command, and wait at most `seconds` for its end; None for no limit.

    The command and its child processes are ended at the limit, and if this process is interrupted or killed.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command_tied_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # If the leader still runs, its process group gets SIGTERM first.
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_END_SECONDS)
            _signal(process, signal.SIGKILL)
            process.wait()
        return FinishedCommand(code=code, printed=_text(printed), errors=_text(errors))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
