"""How long something has worked: CPU time, as time on the wall tells more of the machine than of the work."""

from __future__ import annotations

import math
import os
import time

from equivcheck.worlds.patience import cpu_seconds_of_family

_LOOK_SECONDS = 1.0
"""Between two looks at other processes, which cost milliseconds, and more where a machine has thousands."""


class WorkClock:
    """Counts seconds of CPU time of this process and its descendants from its making on, and what they are said to have waited.

    What a descendant used is lost with its end when nobody has waited for it, but the clock never goes back.
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self._looked, self._others, self._most = -math.inf, 0.0, 0.0
        self._start = self._cpu()

    @property
    def seconds(self) -> float:
        """Worked and waited so far."""
        return self._cpu() - self._start + self._waited

    def wait(self, seconds: float) -> None:
        """Count time on the wall in which nothing could be computed, as that of ranks that hung."""
        self._waited += seconds

    def _cpu(self) -> float:
        now, own = time.monotonic(), sum(os.times()[:4])
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._others = sum(seconds for pid, seconds in cpu_seconds_of_family(os.getpid()).items() if pid != os.getpid())
        self._most = max(self._most, own + self._others)
        return self._most
