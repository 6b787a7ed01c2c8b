"""A worker process as its supervisor sees it: started, spoken to, and ended with all that it started."""

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

from equivcheck.system.parent_death import tie
from equivcheck.system.quiet import quiet
from equivcheck.system.temporary_folder import clear_abandoned
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.workers.fork_server import Forked, current_server
from equivcheck.worlds.workers.link import STACK_SIGNAL

_EXIT_SECONDS = 5.0
"""Limit for a process to be gone after it closed its connection."""
_STACK_SECONDS = 0.5
"""How long a stuck worker gets to write its stacks."""
_TAIL = 8000
"""Bytes of what a worker printed last that are kept."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The tensors are tiny, and every core has a worker already."""
KEPT_KERNELS, KEPT_PRODUCTS = 256, 32
"""What oneDNN keeps: kernels, one for each operation and shape (35 kilobytes), and in each thread descriptions of products in
bfloat16 (8 kilobytes). It would keep 1,024 of both, most of them of checks long past, and a worker has 37 threads."""
_BOUNDED_MEMORY = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS),
    "LRU_CACHE_CAPACITY": str(KEPT_PRODUCTS),
    "MALLOC_ARENA_MAX": "1",  # of glibc: what one thread has freed the others can use; only one of them runs at a time
}
"""For a process that may run for days; what the user has set stays."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Received from a worker that will say nothing more: it has closed its connection, or died."""


class WorkerProcess:
    """A process that runs ``main(fd, *fds)`` of a module, which is to make a `Link` of the first file descriptor.

    `task` is its first message. A subclass says when it `is_stuck`.
    """

    def __init__(self, module: str, task: object, *fds: int) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - kept open until `close`
        self.link, its = Pipe()
        with its:
            self._process = _begun(module, (its.fileno(), *fds), self._output)
        self.send(task)

    @property
    def is_stuck(self) -> bool:
        """Whether it has been silent for longer than what it does may take."""
        return False

    @property
    def pid(self) -> int:
        """Process id; as long as it waits for a process that it is to be forked from, that one's."""
        return self._process.pid

    @property
    def waits_for(self) -> Channel | None:
        """What can be read when `take_place` has something to do; None where it has begun."""
        return self._process.waits_for if isinstance(self._process, Forked) else None

    def take_place(self) -> None:
        """Begin, if it waits to be forked and can be."""
        if isinstance(self._process, Forked):
            self._process.take_place()

    def send(self, message: object) -> None:
        """Say something; to a worker that has died it is lost, which shows when it is read from."""
        with contextlib.suppress(OSError):
            self.link.send(message)

    def poll(self, timeout: float | None = None) -> bool:
        """Whether there is something to receive, after as many seconds at most; it begins as soon as it can be forked."""
        starting = [channel.fileno() for channel in (self.waits_for,) if channel is not None]
        ready = wait([self.link, *starting], timeout)
        self.take_place()
        return self.link in ready

    def receive(self) -> Any:
        """Its next message, or `Ended`; waits for it."""
        while not self.poll():
            pass
        try:
            return self.link.recv()
        except (EOFError, OSError):
            return Ended()

    def printed(self) -> str:
        """What it printed last."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")

    def print_stacks(self) -> None:
        """Have it print the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACK_SIGNAL)
            time.sleep(_STACK_SECONDS)

    def how_it_ended(self) -> str:
        """``was killed by SIGSEGV`` or ``exited with code 7``; a process that closed its connection is given a moment to end."""
        self.end_within(_EXIT_SECONDS)
        code = self._process.returncode
        assert code is not None, "it has been waited for"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def end_within(self, seconds: float) -> None:
        """Wait for its end, and end it if that takes too long."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it and what it started, at once. The ranks of other worlds end when they lose their owner."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if isinstance(self._process, Forked):
                self._process.kill_all()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill it if need be and let go of everything, its temporary folders among it."""
        if self._process.returncode is None:
            self.kill()
        clear_abandoned()
        self.link.close()
        self._output.close()


def worker_environment() -> dict[str, str]:
    """Environment variables of worker processes."""
    return _BOUNDED_MEMORY | quiet(os.environ) | _ONE_THREAD


def _begun(module: str, fds: tuple[int, ...], output: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
    """A process that runs ``main(*fds)`` of a module: forked where workers are, else a new one."""
    server = current_server()
    if server is None or server.is_lost:
        return _start(module, fds, output)
    worker = Forked(server, module, (output.fileno(), *fds), lambda own: _start(module, own[1:], output))
    worker.take_place()
    return worker


def _start(module: str, fds: tuple[int, ...], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run ``main(*fds)`` of a module in a new process with the same import path, which inherits these file descriptors."""
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    arguments = ", ".join(map(str, fds))
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {tie()}; from {module} import main; main({arguments})"],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=worker_environment(),
        start_new_session=True,  # Ctrl-C is for the supervisor
    )
