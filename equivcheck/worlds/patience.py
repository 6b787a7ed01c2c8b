"""When ranks that have not finished count as hung: by what they do, as a busy machine makes everything slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil

TICKS = 20
"""Looks in a row without any work between them, after which ranks count as idle."""
SHORTEST_TICK = 0.05
"""Seconds between two looks, at least: what looking costs itself must not pass for work."""
IDLE_SHARE = 0.02
"""The share of a tick's CPU time below which nothing was done; a machine with 50 runnable threads a core leaves each as much."""
MOST_LIMITS = 10
"""CPU time that ranks which go on making calls may take altogether, as a multiple of the limit."""


class Patience:
    """Watches ranks for one run.

    They count as hung when they have been idle for `limit` seconds, or have computed for `limit` seconds of CPU time without a
    move, such as a call to communicate, or for a multiple of it with moves. Time on the wall alone says nothing. They are first
    looked at after a tick, as reading CPU times costs more than most runs take.
    """

    def __init__(
        self, limit: float, cpu_seconds: Callable[[], Mapping[int, float]], num_moves: Callable[[], int] = lambda: 0
    ) -> None:
        """`cpu_seconds` is what each process has used so far, by any number for it; `num_moves` how often ranks have got on."""
        self.limit, self.tick = limit, max(limit / TICKS, SHORTEST_TICK)
        self._cpu_seconds, self._num_moves = cpu_seconds, num_moves
        self._looked, self._moves, self._idle_ticks = time.monotonic(), num_moves(), 0
        self._why = ""
        self._start: Mapping[int, float] = {}
        self._at_move: Mapping[int, float] = {}
        self._cpu: Mapping[int, float] = {}

    def exhausted(self) -> str:
        """Why the ranks count as hung, from then on for good; empty while they may go on. To be asked about once a tick."""
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
            self._start = self._at_move = self._cpu = cpu
            self._moves = moves
            return
        works = moves != self._moves or _most(cpu, self._cpu) >= IDLE_SHARE * self.tick
        self._idle_ticks = 0 if works else self._idle_ticks + 1
        self._at_move = cpu if moves != self._moves else self._at_move
        self._cpu, self._moves = cpu, moves


def cpu_seconds(pid: int) -> float:
    """What a process, and those that it has started and waited for, have computed; 0 once it has ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return 0.0


def is_runnable(pid: int) -> bool:
    """Whether a process computes, waits for a core or for a disk; not while it sleeps, nor once it has ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING)
    except psutil.Error:
        return False


def cpu_seconds_of_family(pid: int) -> dict[int, float]:
    """The same of a process and all its descendants, by process id."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return {}
    return {process: cpu_seconds(process) for process in (pid, *(each.pid for each in descendants))}


def _most(after: Mapping[int, float], before: Mapping[int, float]) -> float:
    """What the busiest process has used in between."""
    return max((seconds - before.get(process, 0.0) for process, seconds in after.items()), default=0.0)
