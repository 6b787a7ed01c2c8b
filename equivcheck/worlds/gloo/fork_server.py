"""Controls the fork server from the user's process.

The server starts when the first world needs it, and ends with the last world.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from equivcheck.system.parent_death import code_to_end_with_parent
from equivcheck.worlds.failure import RanksDidNotStart, RanksLost, last_line
from equivcheck.worlds.gloo.channel import Channel
from equivcheck.worlds.gloo.request import import_path

START_SECONDS = 120.0
"""Seconds in which the server must import torch, or ranks must join. The time is long, because disks can be cold."""
_RUN_BY_RANKS = tuple(f"equivcheck.{package}." for package in ("layouts", "programs.run", "training", "user", "worlds.state"))
"""Packages with code for ranks. The server imports the parts imported by its owner."""
_SHORT_OF_BLAS_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables for one BLAS thread. Forking is safe only while the process has one thread, and a rank needs only one."""
EARLY_START = "early start of the fork server"
"""Name of the thread in which the server starts in the background."""
_TROUBLE = (EOFError, OSError, RanksDidNotStart, RanksLost)
"""Errors in an early start. Such errors are ignored, because a later fork reports them again."""


class ForkServer:
    """Starts, watches and kills the processes of gloo ranks. All gloo worlds in this process share one server."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._has_compiled = False
        self._imported: frozenset[str] = frozenset()

    def join(self) -> None:
        """Count one more user of this server, such as a gloo world."""
        with self._lock:
            self._num_users += 1

    def leave(self) -> None:
        """Count one user less, and end the server if none is left."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._end()

    @contextlib.contextmanager
    def started_early(self) -> Iterator[None]:
        """Inside this context, the server runs. It starts in the background, because its imports take seconds."""
        self.join()
        threading.Thread(target=self._try_to_start, name=EARLY_START, daemon=True).start()
        try:
            yield
        finally:
            self.leave()

    def _try_to_start(self) -> None:
        with self._lock, contextlib.suppress(*_TROUBLE):
            if self._num_users:  # not if the only one has left already
                self._ensure_running()

    def fork(self, fd: int) -> int:
        """Start a process for a rank, which gets its programs through the socket `fd`. Return the process id.

        Raises `RanksDidNotStart` if the server cannot start, and `RanksLost` if it has ended.
        """
        with self._lock:
            self._ensure_running()
            try:
                self._share_imports()
                return int(self._ask("fork", (), fd))
            except (EOFError, OSError) as error:
                raise RanksLost(f"the fork server of the gloo ranks has ended: {error}") from error

    def prepare_to_compile(self) -> None:
        """Call `torch.compile` once in the server.

        Ranks forked later inherit the compiler's modules, so their first compilation takes a sixth as long.
        """
        with self._lock, contextlib.suppress(*_TROUBLE):
            self._ensure_running()
            if not self._has_compiled:
                self._ask("compile", ())
                self._has_compiled = True

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a rank's process, negative for a signal; None if it is running or the server has ended."""
        with self._lock, contextlib.suppress(EOFError, OSError):
            code: int | None = self._ask("exit_code", (pid,))
            return code
        return None

    def stop(self, pids: tuple[int, ...]) -> None:
        """Kill these ranks' processes and their child processes, and wait until they have ended."""
        with self._lock, contextlib.suppress(EOFError, OSError):
            self._ask("stop", pids)

    def forget(self) -> None:
        """Close this process's connection to the server. A new process calls it right after an `os.fork`.

        The server itself continues for the parent process.
        """
        self._lock = threading.RLock()
        self._num_users = 0
        if self._control:
            self._control.close()
        if self._process:
            self._process.returncode = 0  # not ours: no warning when the object goes
        self._process, self._control, self._has_compiled, self._imported = None, None, False, frozenset()

    def _share_imports(self) -> None:
        """Import this process's modules for ranks in the server too, so that ranks need not import them."""
        names = frozenset(name for name in tuple(sys.modules) if name.startswith(_RUN_BY_RANKS))
        if not names <= self._imported:
            self._ask("import", tuple(sorted(names - self._imported)))
            self._imported |= names

    def _ask(self, verb: str, about: tuple[int, ...] | tuple[str, ...], *fds: int) -> Any:
        if self._control is None:
            raise EOFError("it is not running")
        try:
            self._control.send(pickle.dumps((verb, about)), fds)
            return pickle.loads(self._control.receive())
        except BaseException:
            self._end()  # its next reply would be the answer to this request
            raise

    def _ensure_running(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._start()

    def _start(self) -> None:
        ours, its = Channel.pair()
        with tempfile.TemporaryFile() as errors:
            try:
                self._control = ours
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _command(its.fileno())],
                    pass_fds=(its.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | _SHORT_OF_BLAS_THREADS,
                    start_new_session=True,
                )
                its.close()
                self._greet(ours, errors)
            except BaseException:
                its.close()
                if self._process is not None:
                    self._process.kill()  # it has no ranks, and may be importing for long
                self._end()
                raise

    def _greet(self, control: Channel, errors: IO[bytes]) -> None:
        try:
            trouble = control.receive(until=time.monotonic() + START_SECONDS).decode()
        except TimeoutError:
            raise RanksDidNotStart(f"the fork server of the gloo ranks has not started within {START_SECONDS:g} s") from None
        except (EOFError, OSError) as error:
            errors.seek(0)
            why = last_line(errors.read().decode(errors="replace")) or str(error)
            raise RanksLost(f"the fork server of the gloo ranks ended while it started: {why}") from error
        if trouble:
            raise RanksDidNotStart(f"the fork server of the gloo ranks cannot start: {last_line(trouble)}")

    def _end(self) -> None:
        """End the server.

        Closing its channel makes it kill all ranks and exit; if that fails, the server is killed, and its ranks end with it.
        """
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process, self._control, self._has_compiled, self._imported = None, None, False, frozenset()


def _command(fd: int) -> str:
    serve = f"from equivcheck.worlds.gloo.server import serve; serve({fd})"
    return f"import sys; sys.path[:] = {import_path()!r}; {code_to_end_with_parent()}; {serve}"


FORK_SERVER = ForkServer()
os.register_at_fork(after_in_child=FORK_SERVER.forget)
