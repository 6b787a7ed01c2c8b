"""Feature triples in drawn scenarios."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from equivcheck.campaign.coverage.reach import num_shipped, shipped

if TYPE_CHECKING:
    from equivcheck.scenario import Scenario

_Bits = np.ndarray[Any, np.dtype[np.uint64]]
_Pairs = tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.intp]]]


class Triples:
    """Triples of shipped features: for each pair, the third features as bits."""

    def __init__(self) -> None:
        count = num_shipped()
        self._num_words = -(-count // 64)
        self._thirds: _Bits = np.zeros((count, count, self._num_words), dtype=np.uint64)

    def add(self, scenario: Scenario) -> None:
        """Count a scenario."""
        pairs, mask = self._pairs(scenario)
        self._thirds[pairs] |= mask

    def gain(self, scenario: Scenario) -> int:
        """How many new triples a scenario would add, plus 2/3 for each new pair."""
        pairs, mask = self._pairs(scenario)
        new = mask & ~self._thirds[pairs]
        return int.from_bytes(new.tobytes(), "little").bit_count() // 3

    def _pairs(self, scenario: Scenario) -> tuple[_Pairs, _Bits]:
        """All pairs of a scenario's features by number, and all its features as a bit mask."""
        numbers, mask = shipped(scenario)
        found = np.array(numbers, dtype=np.intp)
        first, second = _two_of(len(numbers))
        return (found[first], found[second]), np.frombuffer(mask.to_bytes(8 * self._num_words, "little"), dtype="<u8")


@cache
def _two_of(count: int) -> _Pairs:
    first, second = np.triu_indices(count, k=1)
    return first, second
