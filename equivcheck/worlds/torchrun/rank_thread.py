"""The thread of a torchrun rank that runs programs, so that the main thread can report progress meanwhile."""

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

    If a program hangs, its thread remains until the process ends.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_busy = False
        self.answers, self._answers = Pipe(duplex=False)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"torchrun-rank-{rank}")
        self._thread.start()

    def start(self, request: bytes) -> None:
        """Run the program in a request from `request_task`. When it ends, its answer arrives in `answers`."""
        self.is_busy = True
        self._requests.put(request)

    def receive(self) -> bytes:
        """Wait for the program's answer and return it."""
        answered = self.answers.recv_bytes()
        self.is_busy = False
        return answered

    @property
    def is_stuck(self) -> bool:
        """Whether the program still runs two seconds after the other ranks' processes have ended."""
        return self.is_busy and not self.answers.poll(_WAKING_SECONDS)

    def cpu_seconds(self) -> float:
        """Return CPU seconds used by this process and its ended child processes.

        The calling thread is not counted, because it only observes.
        """
        return time.process_time() - time.thread_time() + sum(os.times()[2:4])

    def report(self) -> RankReport:
        """Return a report on this rank's program with its current stack."""
        asleep = is_asleep(self._thread.native_id or 0)
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = of_program(list(traceback.extract_stack(frame))) if frame is not None else []
        return busy_report(self.rank, traceback.StackSummary.from_list(frames), asleep)

    def end(self) -> None:
        """Let the thread finish its last program, then end it.

        If the thread still ran when the interpreter exits, the process would abort.
        """
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
    """Return the request to run a task from `gloo.request.pickle_task`."""
    return pickle.dumps((is_user_code, task), pickle.HIGHEST_PROTOCOL)


def _loaded(request: bytes) -> Task:
    is_user_code, task = pickle.loads(request)
    program, arguments = pickle.loads(task)
    return is_user_code, program, arguments
