"""Measures work as CPU time, because wall time depends more on the machine than on the work."""

from __future__ import annotations

import math
import os
import time

from equivcheck.worlds.patience import cpu_seconds_of_family

_LOOK_SECONDS = 1.0
"""Seconds between two reads of other processes' CPU time. A read takes milliseconds, and more on a machine with thousands of
processes."""


class WorkClock:
    """Measures work: CPU seconds that this process and its descendants have used since the clock was created.

    Waiting time can be added with `wait`. A descendant's time is lost if it ends and its parent does not wait for it. The clock
    never goes back.
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self._looked, self._others, self._most = -math.inf, 0.0, 0.0
        self._start = self._cpu()

    @property
    def seconds(self) -> float:
        """CPU seconds so far, plus the seconds added with `wait`."""
        return self._cpu() - self._start + self._waited

    def wait(self, seconds: float) -> None:
        """Add seconds of wall time in which nothing could compute, for example while ranks hung."""
        self._waited += seconds

    def _cpu(self) -> float:
        now, own = time.monotonic(), sum(os.times()[:4])
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._others = sum(seconds for pid, seconds in cpu_seconds_of_family(os.getpid()).items() if pid != os.getpid())
        self._most = max(self._most, own + self._others)
        return self._most
