"""Forked workers behave like started ones, and do not depend on the process that forked them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from equivcheck.worlds.workers.fork_server import WorkerForkServer, current_server, forked_workers
from equivcheck.worlds.workers.process import Ended, WorkerProcess, worker_environment
from equivcheck.worlds.workers.supervision import Pool
from support.processes import end_soon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")


PATIENCE = 60.0
"""Seconds for a worker to end on a busy machine."""


@pytest.fixture
def server() -> Iterator[WorkerForkServer]:
    """A server for workers."""
    with forked_workers("unit.worlds.workers.quick", worker_environment()):
        found = current_server()
        assert found is not None
        yield found


def echo() -> WorkerProcess:
    """A ready worker."""
    worker = WorkerProcess("unit.worlds.workers.echo", "ready")
    assert worker.receive() == "ready"
    return worker


def parent_of(worker: WorkerProcess) -> int:
    """Process id of its parent."""
    return int(Path(f"/proc/{worker.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("order", "how"), [("die", "was killed by SIGABRT"), ("exit", "exited with code 3")])
def test_a_forked_worker_says_how_it_ended(server: WorkerForkServer, order: str, how: str) -> None:
    """The exit code comes from the forking process."""
    with closing(echo()) as worker:
        assert parent_of(worker) == server.pid
        worker.send(order)
        assert worker.receive() == Ended()
        assert worker.how_it_ended() == how


def test_what_a_forked_worker_prints_is_its_own(server: WorkerForkServer) -> None:
    """Each worker has its own output file."""
    with closing(echo()) as worker, closing(echo()) as other:
        assert {parent_of(worker), parent_of(other)} == {server.pid}
        worker.send("loop")
        worker.print_stacks()
        assert 'unit/worlds/workers/echo.py", line' in worker.printed()
        assert other.printed() == ""


def test_a_forked_worker_is_ended_with_what_it_started(server: WorkerForkServer) -> None:
    """It leads a process group like other workers, and nothing of it is left."""
    with closing(echo()) as worker:
        assert parent_of(worker) == server.pid
        worker.send("start another")
        other, own = worker.receive(), worker.pid
        worker.kill()
        assert worker.how_it_ended() == "was killed by SIGKILL"
        assert end_soon(other, own)


def test_workers_outlive_the_process_that_they_were_forked_from(server: WorkerForkServer) -> None:
    """Workers continue if the server is killed, and the next worker is a new process."""
    with closing(echo()) as worker:
        os.kill(server.pid, signal.SIGKILL)
        server._process.wait()
        worker.send("hello")
        assert worker.receive() == "hello"
        with closing(echo()) as later:
            assert parent_of(later) == os.getpid()
        worker.send("exit")
        assert worker.receive() == Ended()
        assert worker.how_it_ended() == "was killed by SIGKILL"


@pytest.mark.slow
def test_a_process_with_threads_is_not_copied() -> None:
    """A copy would lack the threads but have their locks, so such workers start as new processes."""
    with forked_workers("unit.worlds.workers.threaded", worker_environment()), closing(echo()) as worker:
        assert parent_of(worker) == os.getpid()


def test_a_process_that_is_not_copied_keeps_nothing_of_a_worker_open() -> None:
    """The supervisor sees the end of such a worker as of any other."""
    with forked_workers("unit.worlds.workers.threaded", worker_environment()), closing(echo()) as worker:
        worker.send("exit")
        assert worker.poll(PATIENCE), "the connection of a worker that has ended is still open"
        assert worker.receive() == Ended()


def test_workers_start_where_nothing_can_be_warmed_up() -> None:
    """Import errors appear in workers, as without a server."""
    with forked_workers("unit.worlds.workers.missing", worker_environment()), closing(echo()) as worker:
        assert parent_of(worker) == os.getpid()


def test_a_pool_lets_workers_begin_and_ends_those_that_never_did(server: WorkerForkServer) -> None:
    """Readers of messages need not know how workers start; a worker that has not begun is gone at once."""
    with closing(WorkerProcess("unit.worlds.workers.echo", "never read")):
        pass
    with Pool[WorkerProcess]() as pool:
        pool.workers += [WorkerProcess("unit.worlds.workers.echo", "ready") for _ in range(2)]
        heard: list[object] = []
        while len(heard) < 2:
            heard += [message for _, message in pool.messages()]
        pids = [worker.pid for worker in pool.workers]
        assert [parent_of(worker) for worker in pool.workers] == [server.pid] * 2
    assert heard == ["ready"] * 2
    assert end_soon(*pids)
