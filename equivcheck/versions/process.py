"""Processes of another interpreter: this equivcheck or a script on the torch that is installed there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import equivcheck
from equivcheck.system.parent_death import tied
from equivcheck.system.temporary_folder import temporary_folder

_END_SECONDS = 15.0
"""How long a process that is asked to end may take; torchrun ends its ranks meanwhile, which are in sessions of their own."""
_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Environment variables that speak of this interpreter."""


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


def run_python(python: Path, arguments: Sequence[str], *, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
    """Run an interpreter that finds this equivcheck, whatever is installed beside it, and nothing else of this environment.

    Past the limit in seconds, and when this process is interrupted, it is ended with all that it started.
    """
    with temporary_folder() as folder:
        Path(folder, "equivcheck").symlink_to(Path(equivcheck.__path__[0]).resolve(), target_is_directory=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}
        path = {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
        return run([str(python), *arguments], seconds=seconds, environment=inherited | dict(variables or {}) | path)


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
