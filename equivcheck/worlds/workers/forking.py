"""Main program of the workers' fork server: imports everything that checks need, runs one check, and then forks workers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from equivcheck.system.parent_death import end_with_parent, outlive_parent
from equivcheck.system.threads import num_threads
from equivcheck.worlds.gloo.channel import Channel

_LOOKS, _LOOK_SECONDS = 100, 0.02
"""Attempts, and seconds between them, to see that other threads have ended."""


def serve(fd: int, warming: str) -> None:
    """Call ``warm_up()`` in the module `warming`, then fork workers for the supervisor at the other end of the socket `fd`.

    The process ends when the supervisor disconnects, even during the warm-up. Workers continue and detect the supervisor's end
    themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel.of(fd)
    importlib.import_module(warming).warm_up()
    gc.collect()
    gc.freeze()  # later collections skip these objects, so workers share their memory pages and lose no time
    outlive_parent()
    with contextlib.suppress(EOFError, OSError):
        control.send(pickle.dumps(None))
        while True:
            request, fds = control.receive_with_fds()
            control.send(pickle.dumps(_answer(pickle.loads(request), fds, control)))


def _answer(request: tuple[str, Any], fds: tuple[int, ...], control: Channel) -> int | None:
    verb, what = request
    return _forked(what, fds, control) if verb == "fork" else _exit_code(what)


def _forked(module: str, fds: tuple[int, ...], control: Channel) -> int | None:
    """Return a new worker's process id; None if another thread is left, because a forked copy would not have it.

    All of the worker's file descriptors are closed here in both cases; otherwise the supervisor would never see its end.
    """
    server = os.getpid()
    pid = os.fork() if _is_alone() else None
    if pid == 0:
        control.close()
        _become_worker(module, fds, server)
    for each in fds:
        os.close(each)
    return pid


def _is_alone() -> bool:
    """Whether the process has one thread; threads that are about to end get a moment."""
    for _ in range(_LOOKS):
        if num_threads() == 1:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _exit_code(pid: int) -> int | None:
    """Return the ended worker's exit code, negative for a signal. A worker stays a zombie until then."""
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def _become_worker(module: str, fds: tuple[int, ...], server: int) -> NoReturn:
    """Run `main` of a module in the forked copy, as a new process would, and exit.

    `fds` are its output and its own file descriptors.
    """
    try:
        os.setsid()
        end_with_parent(server)  # until it has its connection
        output, *own = fds
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        importlib.import_module(module).main(*own)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)
