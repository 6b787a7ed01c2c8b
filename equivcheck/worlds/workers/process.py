"""A worker process, seen from its supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import IO, Any

from equivcheck.system.parent_death import code_to_end_with_parent
from equivcheck.system.quiet import quiet_environment
from equivcheck.system.temporary_folder import clear_abandoned
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.workers.fork_server import Forked, current_server
from equivcheck.worlds.workers.link import STACK_SIGNAL

_EXIT_SECONDS = 5.0
"""Seconds for a process to exit after it closed its connection."""
_STACK_SECONDS = 0.5
"""Seconds for a stuck worker to write its stacks."""
_TAIL = 8000
"""Bytes that are kept of a worker's last output."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Thread settings of workers: tensors are tiny, and every core already has a worker."""
KEPT_KERNELS, KEPT_PRODUCTS = 256, 32
"""Limits of oneDNN's caches: kernels, one for each operation and shape (35 kilobytes), and in each thread descriptions of
bfloat16 products (8 kilobytes). By default oneDNN keeps 1,024 of both, mostly from past checks, and a worker has 37 threads."""
_BOUNDED_MEMORY = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS),
    "LRU_CACHE_CAPACITY": str(KEPT_PRODUCTS),
    "MALLOC_ARENA_MAX": "1",  # glibc: threads reuse each other's freed memory; only one of them runs at a time
}
"""Memory settings for a process that may run for days; the user's own settings take precedence."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Returned in place of a message if the worker has closed its connection or died."""


class WorkerProcess:
    """Process that runs ``main(fd, *fds)`` of a module. ``main`` should create a `SupervisorLink` from the socket `fd`.

    `task` is the first message to the worker, and `fds` are further open files for it. Subclasses override `is_stuck`.
    """

    def __init__(self, module: str, task: object, *fds: int) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - kept open until `close`
        self.link, its = Pipe()
        with its:
            self._process = _begun(module, (its.fileno(), *fds), self._output)
        self.send(task)

    @property
    def is_stuck(self) -> bool:
        """Whether the worker has been silent for longer than its task may take."""
        return False

    @property
    def pid(self) -> int:
        """The worker's process id, or the fork server's until the worker is forked."""
        return self._process.pid

    @property
    def waits_for(self) -> Channel | None:
        """Channel to the fork server. Call `take_place` when this channel becomes readable.

        None if the worker has started.
        """
        return self._process.waits_for if isinstance(self._process, Forked) else None

    def take_place(self) -> None:
        """Start the worker if the fork server is ready and the worker has not started yet."""
        if isinstance(self._process, Forked):
            self._process.take_place()

    def send(self, message: object) -> None:
        """Send a message to the worker. If the worker has died, the message is lost and the next `receive` returns `Ended`."""
        with contextlib.suppress(OSError):
            self.link.send(message)

    def poll(self, timeout: float | None = None) -> bool:
        """Wait for a message from the worker, at most `timeout` seconds, and return whether one has arrived.

        If the worker has not started yet, it is started as soon as the fork server is ready.
        """
        starting = [channel.fileno() for channel in (self.waits_for,) if channel is not None]
        ready = wait([self.link, *starting], timeout)
        self.take_place()
        return self.link in ready

    def receive(self) -> Any:
        """Wait for the worker's next message and return it; `Ended` if the worker has died."""
        while not self.poll():
            pass
        try:
            return self.link.recv()
        except (EOFError, OSError):
            return Ended()

    def printed(self) -> str:
        """Return the end of the worker's stdout and stderr."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")

    def print_stacks(self) -> None:
        """Make the worker print the stacks of its threads to its stderr."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACK_SIGNAL)
            time.sleep(_STACK_SECONDS)

    def how_it_ended(self) -> str:
        """Return how the process ended: ``was killed by SIGSEGV`` or ``exited with code 7``.

        A worker that has only closed its connection gets some time to end, then it is killed.
        """
        self.end_within(_EXIT_SECONDS)
        code = self._process.returncode
        assert code is not None, "it has been waited for"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def end_within(self, seconds: float) -> None:
        """Wait until the worker has ended. If it has not ended after `seconds`, kill it."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the worker and its child processes at once. If the worker runs gloo ranks, their processes end by themselves."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if isinstance(self._process, Forked):
                self._process.kill_all()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the worker if it still runs, and release its files, connection and temporary folders."""
        if self._process.returncode is None:
            self.kill()
        clear_abandoned()
        self.link.close()
        self._output.close()


def worker_environment() -> dict[str, str]:
    """Return the environment variables for worker processes."""
    return _BOUNDED_MEMORY | quiet_environment(os.environ) | _ONE_THREAD


def _begun(module: str, fds: tuple[int, ...], output: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
    """Start a process for ``main(*fds)`` of a module, forked if a server is available."""
    server = current_server()
    if server is None or server.is_lost:
        return _start(module, fds, output)
    worker = Forked(server, module, (output.fileno(), *fds), lambda own: _start(module, own[1:], output))
    worker.take_place()
    return worker


def _start(module: str, fds: tuple[int, ...], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run ``main(*fds)`` of a module in a new process that inherits these file descriptors and the import path."""
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    arguments = ", ".join(map(str, fds))
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {path!r}; {code_to_end_with_parent()}; from {module} import main; main({arguments})",
        ],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=worker_environment(),
        start_new_session=True,  # Ctrl-C is for the supervisor
    )
