"""Which triples of features some scenarios have had."""

from __future__ import annotations

from itertools import combinations

from equivcheck.coverage.reach import shipped
from equivcheck.scenario import Scenario


class Triples:
    """Triples of shipped features that came together: for every two, the third ones as bits."""

    def __init__(self) -> None:
        self._thirds: dict[tuple[int, int], int] = {}

    def add(self, scenario: Scenario) -> None:
        """Count a scenario."""
        numbers, mask = shipped(scenario)
        for pair in combinations(numbers, 2):
            self._thirds[pair] = self._thirds.get(pair, 0) | mask

    def gain(self, scenario: Scenario) -> int:
        """How many triples a scenario would add, and two thirds for each new pair."""
        numbers, mask = shipped(scenario)
        return sum((mask & ~self._thirds.get(pair, 0)).bit_count() for pair in combinations(numbers, 2)) // 3
