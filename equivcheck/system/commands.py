"""Commands run to their end or to a limit, and ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from equivcheck.system.parent_death import tied

_END_SECONDS = 15.0
"""How long a process that is asked to end may take; torchrun ends its ranks meanwhile, which are in sessions of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a process did."""

    code: int | None
    """Its exit code, negative for a signal; None if it was ended at its time limit."""
    printed: str
    """What it printed on stdout."""
    errors: str
    """What it printed on stderr."""

    @property
    def last_line(self) -> str:
        """The last line that it printed, on stderr if there is any: mostly why it failed."""
        lines = (self.errors.strip() or self.printed.strip()).splitlines()
        return lines[-1].strip() if lines else ""


def run(command: Sequence[str], *, seconds: float | None, environment: Mapping[str, str]) -> Ran:
    """Run a command to its end, or to a limit in seconds; then, and when this process is interrupted or killed, it is ended."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=printed, stderr=errors, env=dict(environment), start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        return Ran(code=code, printed=_text(printed), errors=_text(errors))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask all of a process group to end, unless its leader has, and insist."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_SECONDS)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
