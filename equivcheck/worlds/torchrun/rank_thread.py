"""Rank thread, which runs programs; the main thread stays free to report progress."""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
import traceback
from multiprocessing import Pipe

import torch

from equivcheck.worlds.failure import RankReport
from equivcheck.worlds.gloo.answer import Task, answer
from equivcheck.worlds.gloo.failures import busy_report
from equivcheck.worlds.gloo.stacks import is_asleep, of_program

_WAKING_SECONDS = 2.0
"""Seconds for a thread to wake up when other processes end, because their connections close."""


class RankThread:
    """Thread that runs all programs of this rank, because meshes and DTensor's caches belong to a thread.

    A hung thread stays until the process ends.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_busy = False
        self.answers, self._answers = Pipe(duplex=False)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"torchrun-rank-{rank}")
        self._thread.start()

    def start(self, request: bytes) -> None:
        """Start a request from `request_task`. Its answer arrives in `answers`."""
        self.is_busy = True
        self._requests.put(request)

    def receive(self) -> bytes:
        """Wait for the answer."""
        answered = self.answers.recv_bytes()
        self.is_busy = False
        return answered

    @property
    def is_stuck(self) -> bool:
        """Whether the thread still waits, although other processes have had time to end, which would wake the thread."""
        return self.is_busy and not self.answers.poll(_WAKING_SECONDS)

    def cpu_seconds(self) -> float:
        """CPU seconds for this process and its reaped children, without the calling thread, which only observes."""
        return time.process_time() - time.thread_time() + sum(os.times()[2:4])

    def report(self) -> RankReport:
        """Return a report on this rank with the thread's current stack."""
        asleep = is_asleep(self._thread.native_id or 0)
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = of_program(list(traceback.extract_stack(frame))) if frame is not None else []
        return busy_report(self.rank, traceback.StackSummary.from_list(frames), asleep)

    def end(self) -> None:
        """End the idle thread. A thread that outlives the interpreter would abort the process."""
        self._requests.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._answers.send_bytes(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        before = torch.default_generator.get_state()
        try:
            return answer(self.rank, lambda: _loaded(request))
        finally:
            torch.default_generator.set_state(before)


def request_task(task: bytes, *, is_user_code: bool) -> bytes:
    """Return the request to run a task from `gloo.request.packed`."""
    return pickle.dumps((is_user_code, task), pickle.HIGHEST_PROTOCOL)


def _loaded(request: bytes) -> Task:
    is_user_code, task = pickle.loads(request)
    program, arguments = pickle.loads(task)
    return is_user_code, program, arguments
