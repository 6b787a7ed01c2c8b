"""The fork server's own process: single-threaded, torch imported once, forks a rank whenever its owner asks.

It is not the one of `multiprocessing`: that one is shared with everybody else in the user's process, imports the user's main
script again, ignores `sys.path` while preloading, and ends only with the process that started it.
A rank that ended stays a zombie until the owner asks about it, so no process id is ever used for two ranks.
"""

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
import warnings

from equivcheck.system.parent_death import end_with_parent, outlive_parent
from equivcheck.worlds.gloo.channel import Channel

_EXIT_SECONDS = 1.0
"""How long a rank that closed its channel may take to be gone."""


def serve(fd: int) -> None:
    """Serve the owner at the other end of `fd` until it goes away, then kill every rank that is left.

    While it imports, it is tied to its owner, which waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel.of(fd)
    server = _Server(control)
    try:
        error = _preload_error()
        outlive_parent()
        control.send(error.encode())
        while True:
            server.answer(*control.receive_with_fds())
    except (EOFError, OSError):
        pass
    finally:
        server.stop(tuple(server.ranks))


def _preload_error() -> str:
    """Import everything; the traceback if that fails, else nothing."""
    try:
        from equivcheck.worlds.gloo import rank  # noqa: F401
        from equivcheck.worlds.preload import preload

        preload()
    except Exception:
        return traceback.format_exc()
    _share_objects()
    return ""


def _share_objects() -> None:
    """What the collector never touches again stays in pages shared with every rank."""
    gc.collect()
    gc.freeze()


def _import(names: tuple[str, ...]) -> None:
    """Import modules for all ranks that are forked from now on. If an import fails here, the ranks try it themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    _share_objects()


def _compile() -> None:
    """What does not compile here does so in the ranks, or raises there."""
    from equivcheck.worlds.preload import compile_once

    with contextlib.suppress(Exception):
        compile_once()
    _share_objects()


class _Server:
    def __init__(self, control: Channel) -> None:
        self.ranks: set[int] = set()
        self._control = control

    def answer(self, request: bytes, fds: tuple[int, ...]) -> None:
        """Do what the owner asks, and reply."""
        verb, about = pickle.loads(request)
        reply: int | None = None
        if verb == "fork":
            reply = self._fork(*fds)
        elif verb == "exit_code":
            reply = self._exit_code(*about)
        elif verb == "import":
            _import(about)
        elif verb == "compile":
            _compile()
        else:
            self.stop(about)
        self._control.send(pickle.dumps(reply))

    def _fork(self, fd: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_rank(fd, self._control, server)
        os.close(fd)
        _lead_group(pid)
        self.ranks.add(pid)
        return pid

    def _exit_code(self, pid: int) -> int | None:
        """How a rank ended: its exit code, minus the signal that killed it, or None when it is still there."""
        limit = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < limit:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return self._end(pid)
            time.sleep(0.002)
        return None

    def stop(self, pids: tuple[int, ...]) -> None:
        """Kill ranks and wait until they are gone."""
        alive = [pid for pid in pids if pid in self.ranks]
        for pid in alive:
            _kill_group(pid)
        for pid in alive:
            self._end(pid)

    def _end(self, pid: int) -> int:
        """Kill what a rank started itself, wait for it, and forget it."""
        _kill_group(pid)
        self.ranks.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _lead_group(pid: int) -> None:
    """Give a rank a process group of its own; both sides do it, as either may come first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _become_rank(fd: int, control: Channel, server: int) -> None:
    """In the forked process: serve as a rank; never returns."""
    code = 1
    try:
        control.close()
        _lead_group(os.getpid())
        end_with_parent(server)  # elsewhere than on Linux a rank ends once it is idle
        from equivcheck.worlds.gloo.rank import serve_rank

        serve_rank(Channel.of(fd))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
