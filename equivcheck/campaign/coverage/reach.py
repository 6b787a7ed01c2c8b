"""Counts feature pairs and triples in drawn scenarios. Counting takes less than a millisecond for a scenario."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np

from equivcheck.campaign.coverage.features import Feature, features
from equivcheck.campaign.coverage.pairs import Pairs, legal_pairs
from equivcheck.scenario import Scenario

if TYPE_CHECKING:
    from equivcheck.scenario import Scenario


class Reach:
    """The feature pairs in counted scenarios.

    Only features in the package's table of legal pairs count. The object is small enough to send between processes.
    """

    def __init__(self) -> None:
        self.num_scenarios = 0
        self.unknown: set[Feature] = set()
        """Third-party features, and features newer than the table of legal pairs. They count in no pair."""
        self._rows = [0] * len(_numbers())

    def add(self, scenario: Scenario) -> None:
        """Count the feature pairs in a scenario."""
        self.num_scenarios += 1
        self.unknown |= features(scenario) - _numbers().keys()
        numbers, mask = shipped_features(scenario)
        for number in numbers:
            self._rows[number] |= mask

    def gain(self, scenario: Scenario) -> int:
        """How many feature pairs a scenario would add. Each pair counts twice, once for each order."""
        numbers, mask = shipped_features(scenario)
        return sum((mask & ~self._rows[number]).bit_count() for number in numbers)

    def merge(self, other: Reach) -> None:
        """Add the feature pairs counted by another object."""
        self.num_scenarios += other.num_scenarios
        self.unknown |= other.unknown
        self._rows = [mine | theirs for mine, theirs in zip(self._rows, other._rows, strict=True)]

    @property
    def drawn_pairs(self) -> Pairs:
        """Feature pairs that counted scenarios had."""
        order = legal_pairs().features
        return Pairs(order, tuple(row & ~(1 << number) for number, row in enumerate(self._rows)))

    @property
    def legal(self) -> Pairs:
        """Possible feature pairs: those in the table of legal pairs, and those in counted scenarios."""
        known = legal_pairs()
        return Pairs(known.features, tuple(one | other for one, other in zip(known.rows, self.drawn_pairs.rows, strict=True)))

    @property
    def missing(self) -> Pairs:
        """Possible feature pairs that no counted scenario had."""
        legal, drawn = self.legal, self.drawn_pairs
        return Pairs(legal.features, tuple(one & ~other for one, other in zip(legal.rows, drawn.rows, strict=True)))

    @property
    def share(self) -> float:
        """Share of the possible feature pairs that counted scenarios had, from 0 to 1."""
        return self.drawn_pairs.count / max(1, self.legal.count)


def num_shipped() -> int:
    """How many features the package's table of legal pairs has."""
    return len(_numbers())


@lru_cache(maxsize=4)
def shipped_features(scenario: Scenario) -> tuple[tuple[int, ...], int]:
    """Return the indices of a scenario's features in the table of legal pairs, sorted, and the same indices as a bit mask.

    Features outside the table are left out. The last few results are cached, because choosing a scenario needs them several
    times.
    """
    known = _numbers()
    numbers = tuple(sorted(known[feature] for feature in features(scenario) if feature in known))
    return numbers, sum(1 << number for number in numbers)


def by_parts(pairs: Pairs) -> dict[tuple[str, str], int]:
    """Count the pairs for every two parts of a scenario, such as model and optimizer."""
    parts = sorted({feature.part for feature in pairs.features})
    counts = dict.fromkeys(combinations_with_replacement(parts, 2), 0)
    for number, feature in enumerate(pairs.features):
        for other in pairs.of(number):
            if other > number:
                counts[tuple(sorted((feature.part, pairs.features[other].part)))] += 1  # type: ignore[index]
    return counts


@cache
def _numbers() -> dict[Feature, int]:
    return {feature: number for number, feature in enumerate(legal_pairs().features)}


_Bits = np.ndarray[Any, np.dtype[np.uint64]]
_Pairs = tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.intp]]]


class Triples:
    """The feature triples in counted scenarios.

    Each pair of features has a bit mask: the features found together with this pair.
    """

    def __init__(self) -> None:
        count = num_shipped()
        self._num_words = -(-count // 64)
        self._thirds: _Bits = np.zeros((count, count, self._num_words), dtype=np.uint64)

    def add(self, scenario: Scenario) -> None:
        """Count the feature triples in a scenario."""
        pairs, mask = self._pairs(scenario)
        self._thirds[pairs] |= mask

    def gain(self, scenario: Scenario) -> int:
        """How many feature triples a scenario would add, plus 2/3 for each new pair."""
        pairs, mask = self._pairs(scenario)
        new = mask & ~self._thirds[pairs]
        return int.from_bytes(new.tobytes(), "little").bit_count() // 3

    def _pairs(self, scenario: Scenario) -> tuple[_Pairs, _Bits]:
        """Return the pairs of a scenario's features by number, and all its features as a bit mask."""
        numbers, mask = shipped_features(scenario)
        found = np.array(numbers, dtype=np.intp)
        first, second = _two_of(len(numbers))
        return (found[first], found[second]), np.frombuffer(mask.to_bytes(8 * self._num_words, "little"), dtype="<u8")


@cache
def _two_of(count: int) -> _Pairs:
    first, second = np.triu_indices(count, k=1)
    return first, second
