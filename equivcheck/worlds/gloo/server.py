"""Fork server process: single-threaded, imports torch once, and forks a rank on request.

`multiprocessing` has a fork server too, but the user's process shares it with everybody. That server imports the user's main
script again, ignores `sys.path` while preloading, and ends only with its owner.

A rank that ended stays a zombie until the owner reads its exit code, so no process id is used twice.
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
"""Seconds for a rank to exit after it closed its channel."""


def serve(fd: int) -> None:
    """Run the fork server: fork a rank at each request on the socket `fd` until the other end disconnects, then kill all ranks.

    While the server imports torch, it also ends if its parent process ends.
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
    """Import everything, and return the traceback if that fails; else empty."""
    try:
        from equivcheck.worlds.gloo import rank  # noqa: F401
        from equivcheck.worlds.processes.preload import preload

        preload()
    except Exception:
        return traceback.format_exc()
    _share_objects()
    return ""


def _share_objects() -> None:
    """Freeze objects against garbage collection, so that their memory pages stay shared with every rank."""
    gc.collect()
    gc.freeze()


def _import(names: tuple[str, ...]) -> None:
    """Import modules for all ranks forked later. If an import fails here, the ranks repeat it themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    _share_objects()


def _compile() -> None:
    """Compile once. If that fails here, the ranks compile themselves and report the error."""
    from equivcheck.worlds.processes.preload import compile_once

    with contextlib.suppress(Exception):
        compile_once()
    _share_objects()


class _Server:
    def __init__(self, control: Channel) -> None:
        self.ranks: set[int] = set()
        self._control = control

    def answer(self, request: bytes, fds: tuple[int, ...]) -> None:
        """Carry out a request from the process that started the server, such as to fork a rank, and send the result."""
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
        """Return the rank's exit code, negative for a signal; None if it still runs."""
        limit = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < limit:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return self._end(pid)
            time.sleep(0.002)
        return None

    def stop(self, pids: tuple[int, ...]) -> None:
        """Kill these ranks' processes, and wait until they have ended."""
        alive = [pid for pid in pids if pid in self.ranks]
        for pid in alive:
            _kill_group(pid)
        for pid in alive:
            self._end(pid)

    def _end(self, pid: int) -> int:
        """Kill the rank's children, reap the rank, and forget it."""
        _kill_group(pid)
        self.ranks.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _lead_group(pid: int) -> None:
    """Give a rank its own process group; both processes do this, because either may be first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _become_rank(fd: int, control: Channel, server: int) -> None:
    """Serve as a rank in the forked process; never returns."""
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
