"""Worker processes and their supervision."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from equivcheck.worlds.workers.link import Stop
from equivcheck.worlds.workers.process import KEPT_KERNELS, Ended, WorkerProcess
from equivcheck.worlds.workers.supervision import Pool, Stuck
from support.processes import end_soon
from unit.worlds.workers.echo import Unreadable


def echo() -> WorkerProcess:
    """A ready worker."""
    worker = WorkerProcess("unit.worlds.workers.echo", "ready")
    assert worker.receive() == "ready"
    return worker


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """A worker, closed at the end."""
    with closing(echo()) as made:
        yield made


@pytest.mark.parametrize(("order", "how"), [("die", "was killed by SIGABRT"), ("exit", "exited with code 3")])
def test_the_end_of_a_worker_is_received_and_told(worker: WorkerProcess, order: str, how: str) -> None:
    """After its end the cause is known, and sent messages are lost without an error."""
    worker.send(order)
    assert worker.receive() == Ended()
    assert worker.how_it_ended() == how
    worker.send("lost")
    assert worker.receive() == Ended()


def test_what_a_worker_printed_last_is_kept(worker: WorkerProcess) -> None:
    """The supervisor can read its output and the stacks of its threads."""
    worker.send("loop")
    worker.print_stacks()
    assert 'unit/worlds/workers/echo.py", line' in worker.printed()


def test_a_busy_worker_hears_that_it_is_to_stop(worker: WorkerProcess) -> None:
    """A stop is an event, not another message in the queue."""
    worker.send("until stopped")
    worker.send(Stop())
    assert worker.receive() == "stopped"


def test_a_message_that_cannot_be_read_ends_the_worker(worker: WorkerProcess) -> None:
    """It reports the error and ends, instead of waiting for the message again."""
    worker.send(Unreadable())
    assert worker.receive() == Ended()
    assert worker.how_it_ended() == "exited with code 1"
    assert "no_such_name" in worker.printed()


def test_a_worker_is_ended_with_what_it_started(worker: WorkerProcess) -> None:
    """Nothing is left from a worker's child processes."""
    worker.send("start another")
    pid = worker.receive()
    worker.kill()
    assert end_soon(pid)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_worker_keeps_so_many_compiled_kernels_and_no_more() -> None:
    """A kernel is compiled for each shape: those of one check stay, those of hundreds of checks do not."""
    with closing(WorkerProcess("unit.worlds.workers.kernels", KEPT_KERNELS + 1)) as worker:
        assert worker.receive() == Ended()
        assert worker.how_it_ended() == "exited with code 0"
        assert re.findall(r"create:cache_(hit|miss),cpu,eltwise", worker.printed()) == ["hit", "miss"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 to say what is in use")
def test_a_worker_does_not_hoard_memory() -> None:
    """Memory in use stays constant for any number of shapes, and all threads share one heap."""
    num_products = KEPT_KERNELS + 44
    with closing(WorkerProcess("unit.worlds.workers.memory", num_products)) as worker:
        *_, earlier, later = worker.receive()  # up to torch 2.12 it settles after a thousand products
        assert later - earlier < 1000 * num_products
        assert worker.receive() == 1


class Impatient(WorkerProcess):
    """A worker stuck from the start."""

    @property
    def is_stuck(self) -> bool:
        """Always True."""
        return True


def test_a_pool_hears_all_workers_and_leaves_none() -> None:
    """Messages come with their worker, including ends and stuck workers; at the end every process is gone."""
    with Pool[WorkerProcess]() as pool:
        pool.workers += [echo(), echo(), Impatient("unit.worlds.workers.echo", "ready")]
        first, second, impatient = pool.workers
        first.send("exit")
        second.send("hello")
        heard: list[tuple[WorkerProcess, object]] = []
        until = time.monotonic() + 120.0
        while (impatient, "ready") not in heard or (first, Ended()) not in heard or (second, "hello") not in heard:
            assert time.monotonic() < until
            heard += pool.messages()
        assert (impatient, Stuck()) in heard
        assert (second, Stuck()) not in heard
        pool.remove(first)
        assert pool.workers == [second, impatient]
        pids = [worker._process.pid for worker in pool.workers]
    assert end_soon(*pids)
