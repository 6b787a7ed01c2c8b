"""Keeps a set of workers, none of which outlives its supervisor, and turns Ctrl-C into a request to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

from equivcheck.worlds.workers.process import WorkerProcess

_TICK = 0.2
"""Seconds between two checks of the workers."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

W = TypeVar("W", bound=WorkerProcess)


@dataclass(frozen=True, slots=True)
class Stuck:
    """Returned in place of a message from a worker whose `is_stuck` is True."""


class Pool(Generic[W]):
    """Set of worker processes. When the context exits, all remaining workers are killed and closed."""

    def __init__(self) -> None:
        self.workers: list[W] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.close()

    def messages(self) -> Iterator[tuple[W, Any]]:
        """Wait briefly, then yield workers with their next message. `Ended` stands for a dead worker.

        Stuck workers are yielded at the end, with `Stuck`.
        """
        links = {worker.link: worker for worker in self.workers}
        starting = {channel.fileno() for worker in self.workers if (channel := worker.waits_for)}
        said = wait([*links, *starting], timeout=_TICK)
        for worker in self.workers:
            worker.take_place()
        for link in said:
            if link in links:
                worker = links[link]
                yield worker, worker.receive()
        for worker in [worker for worker in self.workers if worker.is_stuck]:
            yield worker, Stuck()

    def remove(self, worker: W) -> None:
        """Close a worker and remove it from the set. If it still runs, it is killed."""
        self.workers.remove(worker)
        worker.close()


class Interruption:
    """Context in which Ctrl-C and SIGTERM only set `requested`, so that they do not interrupt a write.

    A second signal raises `KeyboardInterrupt`. The context has no effect outside the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
