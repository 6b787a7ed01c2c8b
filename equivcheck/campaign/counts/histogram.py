"""Histogram with buckets narrow enough for quantiles."""

from __future__ import annotations

import math
from collections import Counter

_LOG_RATIO = math.log(1.05)
"""Bucket width: a quantile is off by at most 2.5 %."""
_SMALLEST = 1e-6
"""Smaller numbers count as 0."""
_ZERO = math.floor(math.log(_SMALLEST) / _LOG_RATIO)
"""Bucket for 0."""


class Histogram:
    """Histogram of positive numbers, such as seconds or relative errors, small enough to send between processes."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.total = 0.0
        """Sum over all numbers."""

    def add(self, number: float) -> None:
        """Count one number."""
        self._buckets[math.floor(math.log(max(number, _SMALLEST)) / _LOG_RATIO)] += 1
        self.total += number

    def merge(self, other: Histogram) -> None:
        """Add another histogram's counts."""
        self._buckets.update(other._buckets)
        self.total += other.total

    @property
    def count(self) -> int:
        """How many numbers were added."""
        return self._buckets.total()

    @property
    def buckets(self) -> list[tuple[float, int]]:
        """Middle and count for each bucket, smallest first."""
        return [(_middle(bucket), number) for bucket, number in sorted(self._buckets.items())]

    def quantile(self, share: float) -> float:
        """The smallest value that a share (0 to 1) of all numbers does not exceed; NaN if there are none."""
        left = share * self.count
        for bucket, number in sorted(self._buckets.items()):
            left -= number
            if left <= 0:
                return 0.0 if bucket == _ZERO else _middle(bucket)
        return math.nan


def _middle(bucket: int) -> float:
    return math.exp((bucket + 0.5) * _LOG_RATIO)
