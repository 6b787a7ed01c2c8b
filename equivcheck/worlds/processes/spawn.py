"""Runs a program once on new processes, in the way of PyTorch's own multi-process tests.

The benchmark compares equivcheck's worlds with this module.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from equivcheck.system.parent_death import code_to_end_with_parent
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.rank import leave, serve_rank
from equivcheck.worlds.gloo.rank_processes import RankProcesses
from equivcheck.worlds.gloo.request import import_path, pickle_task, request
from equivcheck.worlds.ranks import Run

_EXIT_SECONDS = 30.0
"""Seconds for a process to leave its world and exit."""


def run_spawned(program: Callable[..., Any], *arguments: Any, size: int, deadline: float = 60.0) -> Run:
    """Start a Python process for each rank, call ``program(*arguments)`` on all of them, and let them exit.

    `deadline` is in seconds and begins when all ranks have joined. Raises `RanksFailed` if a rank raises, dies or hangs.
    """
    task = pickle_task(program, arguments)
    with contextlib.ExitStack() as undo:
        started = [_start(undo) for _ in range(size)]
        by_pid = {process.pid: process for process, _ in started}
        ranks = RankProcesses(tuple((process.pid, channel) for process, channel in started), lambda pid: _exit_code(by_pid[pid]))
        undo.callback(ranks.close)
        ranks.form()
        values = ranks.run(request(task, None), deadline)
        ranks.close()
        for process, _ in started:
            process.wait(_EXIT_SECONDS)
    return Run(values=values)


def serve_once(fd: int) -> None:
    """Run as a rank in a new process until the other end closes the socket `fd`, then destroy the process group."""
    serve_rank(Channel.of(fd))
    leave()


def _start(undo: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], Channel]:
    ours, its = Channel.pair()
    process = subprocess.Popen([sys.executable, "-c", _command(its.fileno())], pass_fds=(its.fileno(),), stdin=subprocess.DEVNULL)
    its.close()
    undo.callback(_kill, process)
    return process, ours


def _command(fd: int) -> str:
    serve = f"from equivcheck.worlds.processes.spawn import serve_once; serve_once({fd})"
    return f"import sys; sys.path[:] = {import_path()!r}; {code_to_end_with_parent()}; {serve}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1.0)
    return None
