"""Decides when unfinished ranks count as hung. CPU time is measured, because wall time depends on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil

TICKS = 20
"""Consecutive observations without work after which ranks count as idle."""
SHORTEST_TICK = 0.05
"""Minimum seconds between two observations, so that observing is not mistaken for work."""
IDLE_SHARE = 0.02
"""CPU time per tick, as a fraction, below which a rank did nothing.
With 50 runnable threads on each core, a thread still gets this much."""
CLOCK_STEPS = 0.015
"""CPU seconds below which a rank did nothing.
Systems count in steps of 10 ms, and an idle process uses one such step every few seconds."""
MOST_LIMITS = 10
"""Maximum CPU time for ranks that communicate regularly, as a multiple of the normal limit."""


class Patience:
    """Watches all ranks in one run, and decides when they count as hung.

    Ranks count as hung after `limit` idle seconds, or after `limit` CPU seconds without progress, such as a communication call.
    With progress, they count as hung after `MOST_LIMITS` times `limit` CPU seconds. The first observation comes after `tick`
    seconds, because most runs end sooner.
    """

    def __init__(
        self, limit: float, cpu_seconds: Callable[[], Mapping[int, float]], num_moves: Callable[[], int] = lambda: 0
    ) -> None:
        """`cpu_seconds` returns each process's CPU time, keyed by any number; `num_moves` counts ranks' progress."""
        self.limit, self.tick = limit, max(limit / TICKS, SHORTEST_TICK)
        self._cpu_seconds, self._num_moves = cpu_seconds, num_moves
        self._looked, self._moves, self._idle_ticks = time.monotonic(), num_moves(), 0
        self._why = ""
        self._start: Mapping[int, float] = {}
        self._at_move: Mapping[int, float] = {}
        self._cpu: Mapping[int, float] = {}
        self._at_work: Mapping[int, float] = {}

    def exhausted(self) -> str:
        """Return why the ranks count as hung, or an empty text if they do not. Call it every `tick` seconds.

        After the ranks count as hung, each call returns the first reason again.
        """
        now = time.monotonic()
        if not self._why and now - self._looked >= self.tick:
            self._look()
            self._looked, self._why = now, self._reason()
        return self._why

    def _reason(self) -> str:
        if self._idle_ticks >= TICKS:
            return f"idle for {self.limit:g} s"
        if _most(self._cpu, self._at_move) > self.limit:
            return f"nothing but computing for {self.limit:g} s of CPU time"
        if _most(self._cpu, self._start) > MOST_LIMITS * self.limit:
            return f"not finished after {MOST_LIMITS * self.limit:g} s of CPU time"
        return ""

    def _look(self) -> None:
        cpu, moves = self._cpu_seconds(), self._num_moves()
        if not self._start:
            self._start = self._at_move = self._cpu = self._at_work = cpu
            self._moves = moves
            return
        lately = _most(cpu, self._cpu) >= max(IDLE_SHARE * self.tick, CLOCK_STEPS)
        steadily = _most(cpu, self._at_work) >= max(IDLE_SHARE * self.tick * (self._idle_ticks + 1), CLOCK_STEPS)
        works = moves != self._moves or lately or steadily
        self._idle_ticks = 0 if works else self._idle_ticks + 1
        self._at_work = cpu if works else self._at_work
        self._at_move = cpu if moves != self._moves else self._at_move
        self._cpu, self._moves = cpu, moves


def cpu_seconds(pid: int) -> float:
    """Return CPU seconds used by a process and its ended child processes; 0 after the process itself has ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return 0.0


def is_runnable(pid: int) -> bool:
    """Whether a process runs, waits for a core, or waits for a disk; False if it sleeps or has ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING)
    except psutil.Error:
        return False


def cpu_seconds_of_family(pid: int) -> dict[int, float]:
    """Return CPU seconds used by a process and by each of its descendants, by process id."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return {}
    return {process: cpu_seconds(process) for process in (pid, *(each.pid for each in descendants))}


def _most(after: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Largest CPU time that one process used between two observations."""
    return max((seconds - before.get(process, 0.0) for process, seconds in after.items()), default=0.0)
