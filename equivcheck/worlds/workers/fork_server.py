"""Forks worker processes from one server process that has already imported everything they need.

The server imports while its supervisor does other work, and a worker starts as soon as it can be forked. If the server is killed,
workers continue, and later workers start as new processes. On systems other than Linux, all workers start as new processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from equivcheck.system.parent_death import code_to_end_with_parent
from equivcheck.worlds.gloo.channel import Channel

Start = Callable[[tuple[int, ...]], "subprocess.Popen[bytes]"]
"""Called to start a worker as a new process, with inherited file descriptors."""

UNKNOWN_CODE = -signal.SIGKILL
"""Exit code of a worker whose parent ended first. The cause is unknown, because both may have been killed by the same event."""


class WorkerForkServer:
    """Starts a server process, and asks it to fork workers.

    The constructor does not wait until the server has imported its modules. If the server fails, workers start as new processes.
    """

    def __init__(self, warming: str, environment: Mapping[str, str]) -> None:
        ours, its = Channel.pair()
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        self.warming = warming
        serve = f"from equivcheck.worlds.workers.forking import serve; serve({its.fileno()}, {warming!r})"
        self.control = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code_to_end_with_parent()}; {serve}"],
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the supervisor
        )
        its.close()
        self._imports = True
        self.is_lost = False
        """Whether the server can no longer fork."""

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether `fork` returns at once: the server has finished its imports, or has ended."""
        if self._imports and select.select([self.control], [], [], 0)[0]:
            self._imports = False
            self._receive()
        return not self._imports

    def fork(self, module: str, fds: tuple[int, ...]) -> int | None:
        """Fork a worker that runs ``main`` of a module, and return its process id; None if the server cannot fork it."""
        pid = self._ask(("fork", module), fds)
        return None if pid is None else int(pid)

    def exit_code(self, pid: int) -> int:
        """Return the exit code of an ended worker."""
        code = self._ask(("exit_code", pid))
        return UNKNOWN_CODE if code is None else int(code)

    def close(self) -> None:
        """Kill the server. Its workers continue."""
        self.control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: tuple[str, Any], fds: tuple[int, ...] = ()) -> Any:
        if self.is_lost:
            return None
        with contextlib.suppress(OSError):
            self.control.send(pickle.dumps(request), fds)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return pickle.loads(self.control.receive())
        except (EOFError, OSError):
            self.is_lost = True
            return None


class Forked:
    """A worker process, forked as soon as the server is ready.

    It has the methods of `subprocess.Popen` that a supervisor uses.
    """

    def __init__(self, server: WorkerForkServer, module: str, fds: tuple[int, ...], start: Start) -> None:
        self.returncode: int | None = None
        self._server, self._module, self._start = server, module, start
        self._fds = tuple(map(os.dup, fds))
        self._process: subprocess.Popen[bytes] | int | None = None
        self._end = -1

    @property
    def pid(self) -> int:
        """The worker's process id, or the server's until the worker is forked."""
        if self._process is None:
            return self._server.pid
        return self._process if isinstance(self._process, int) else self._process.pid

    @property
    def waits_for(self) -> Channel | None:
        """Channel to the server. Call `take_place` when this channel becomes readable.

        None if the worker has started.
        """
        return self._server.control if self._process is None and self.returncode is None else None

    def take_place(self) -> None:
        """Start the worker if the server is ready and the worker has not started yet."""
        if self._process is None and self.returncode is None and self._server.is_ready:
            pid = self._server.fork(self._module, self._fds)
            if pid is not None:
                self._end = os.pidfd_open(pid)
            self._process = self._start(self._fds) if pid is None else pid
            self._close_fds()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker has ended, and return its exit code. Raises `subprocess.TimeoutExpired`."""
        if isinstance(self._process, subprocess.Popen):
            self.returncode = self._process.wait(timeout)
        elif self._process is None:
            self.returncode = UNKNOWN_CODE
            self._close_fds()
        elif self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
            os.close(self._end)
            self.returncode = self._server.exit_code(self._process)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the worker is running."""
        if self._process is not None and self.returncode is None:
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """Kill the worker and its child processes."""
        if self._process is not None:
            os.killpg(self.pid, signal.SIGKILL)

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


_servers: list[WorkerForkServer] = []
"""Servers of this process's campaigns, newest last."""


@contextlib.contextmanager
def forked_workers(warming: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Inside this context, fork workers from a server process if possible.

    The server first calls ``warm_up()`` of the module `warming`. If an outer context has already started such a server, that
    server is used.
    """
    current = current_server()
    if sys.platform != "linux" or (current is not None and current.warming == warming and not current.is_lost):
        yield
        return
    server = WorkerForkServer(warming, environment)
    _servers.append(server)
    try:
        yield
    finally:
        _servers.remove(server)
        server.close()


def current_server() -> WorkerForkServer | None:
    """Return the newest fork server; None if there is none."""
    return _servers[-1] if _servers else None
