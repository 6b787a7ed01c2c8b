"""Worker processes: how they start, how they are ended with all that they started, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO

from equivcheck.quiet import quiet

_EXIT_SECONDS = 5.0
"""Limit for a process to be gone after it closed its connection."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The tensors are tiny, and every core has a worker already."""

Process = subprocess.Popen[bytes]


def start(module: str, fds: tuple[int, ...], output: IO[bytes] | int = subprocess.DEVNULL) -> Process:
    """Run ``main(*fds)`` of a module in a new process with the same import path, which inherits these file descriptors."""
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    arguments = ", ".join(map(str, fds))
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; from {module} import main; main({arguments})"],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=quiet(os.environ) | _ONE_THREAD,
        start_new_session=True,  # Ctrl-C is for the supervisor
    )


def end_within(process: Process, seconds: float = _EXIT_SECONDS) -> None:
    """Wait for a process's end, and end it if that takes too long."""
    try:
        process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: Process) -> None:
    """End a process and what it started, at once. The ranks of other worlds end when they lose their owner."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_it_ended(process: Process) -> str:
    """``was killed by SIGSEGV`` or ``exited with code 7``; a process that closed its connection is given a moment to end."""
    end_within(process)
    code = process.returncode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
