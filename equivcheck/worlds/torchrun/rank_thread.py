"""The thread in which a process runs programs as its rank: the main thread stays free to tell how it gets on."""

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
from equivcheck.worlds.gloo.failures import busy
from equivcheck.worlds.gloo.stacks import of_program, sleeps

_WAKING_SECONDS = 2.0
"""Time that a thread gets to be woken by the end of other processes, whose connections end with them."""


class RankThread:
    """Kept for all programs, as meshes and what DTensor finds out are a thread's. One that hangs is left to the process's end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_busy = False
        self.answers, self._answers = Pipe(duplex=False)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"torchrun-rank-{rank}")
        self._thread.start()

    def start(self, request: bytes) -> None:
        """Run what `requested` has made; its answer can be received from `answers`."""
        self.is_busy = True
        self._requests.put(request)

    def receive(self) -> bytes:
        """The answer."""
        answered = self.answers.recv_bytes()
        self.is_busy = False
        return answered

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for others though their processes have had time to end, which wakes it."""
        return self.is_busy and not self.answers.poll(_WAKING_SECONDS)

    def cpu_seconds(self) -> float:
        """What this process has computed, and those that it has waited for, without the calling thread, which only looks on."""
        return time.process_time() - time.thread_time() + sum(os.times()[2:4])

    def report(self) -> RankReport:
        """Where it is."""
        asleep = sleeps(self._thread.native_id or 0)
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = of_program(list(traceback.extract_stack(frame))) if frame is not None else []
        return busy(self.rank, traceback.StackSummary.from_list(frames), asleep)

    def end(self) -> None:
        """End it while it has nothing to do; one that ends beside the interpreter aborts the process."""
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


def requested(task: bytes, *, is_foreign: bool) -> bytes:
    """What a rank is asked to run: a task as `gloo.request.packed` makes it."""
    return pickle.dumps((is_foreign, task), pickle.HIGHEST_PROTOCOL)


def _loaded(request: bytes) -> Task:
    is_foreign, task = pickle.loads(request)
    program, arguments = pickle.loads(task)
    return is_foreign, program, arguments
