"""The process that workers are forked from: it has one thread, has imported all that checks need, and has checked once."""

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
"""How often, and how far apart, it is looked whether threads have ended."""


def serve(fd: int, warming: str) -> None:
    """Call ``warm_up()`` of a module, say so, and serve the supervisor at the other end of `fd` until it goes away.

    While it warms up, it is tied to the supervisor. Workers see for themselves when nobody is left to talk to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel.of(fd)
    importlib.import_module(warming).warm_up()
    gc.collect()
    gc.freeze()  # what the collector never touches again stays in pages that workers share, and costs them no time
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
    """The process id of a new worker; None where a thread has been left, which a copy would not have.

    Either way nothing of the worker's stays open here, or its supervisor would never see that it has ended.
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
    """Whether there is no other thread; those that are about to end, on a busy machine, are given a moment."""
    for _ in range(_LOOKS):
        if num_threads() == 1:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _exit_code(pid: int) -> int | None:
    """How a worker ended, minus the signal that killed it; it has ended, and stays a zombie until it is asked about."""
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def _become_worker(module: str, fds: tuple[int, ...], server: int) -> NoReturn:
    """In the copy: run `main` of a module as a new process would, and end; `fds` are its output and its own."""
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
