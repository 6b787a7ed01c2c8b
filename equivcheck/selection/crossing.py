"""What is drawn, made worth more by parts of what was drawn before it.

Rare features seldom meet by chance: two that are drawn once in a hundred each come together once in ten thousand. As tools that
build covering arrays do (Cohen et al., The AETG system, 1997), a scenario is made from parts one after the other, each the one of
a few that brings the most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from random import Random

from equivcheck.coverage.crossing import crossed
from equivcheck.coverage.features import Path, located_features
from equivcheck.coverage.reach import Reach, number_of
from equivcheck.scenario import Scenario, Training

PARTS: tuple[Path, ...] = (*(("training", field.name) for field in fields(Training) if field.name != "seed"), ("layout",))
"""What is tried of others first."""
RESUME = "resume"
"""What stays as it is: limits of two layouts at once take long to look through."""
NUM_TRIES = 2
"""Others of which each part is tried."""
NUM_LEVELS = 3
"""What has a feature is tried: the field, the noun that has it, and so many in all."""
MOST_IN_VAIN = 10
"""Features, those with the most missing pairs first, that are tried without a gain before it is enough."""
KEPT_SCENARIOS, KEPT_OF_A_FEATURE = 60, 6
"""How many of the last scenarios parts are taken from, and with each feature features."""


class Crossing:
    """Keeps drawn scenarios, and takes parts of them."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._random = Random(0)
        self._recent: deque[Scenario] = deque(maxlen=KEPT_SCENARIOS)
        self._examples: dict[int, deque[tuple[Scenario, Path]]] = {}

    def add(self, scenario: Scenario) -> None:
        """Keep a scenario."""
        self._recent.append(scenario)
        for feature, path in located_features(scenario):
            number = number_of(feature)
            if number is not None and path[0] != RESUME:
                self._examples.setdefault(number, deque(maxlen=KEPT_OF_A_FEATURE)).append((scenario, path))

    def improved(self, scenario: Scenario, worth: Callable[[Scenario], float]) -> Scenario:
        """The scenario with parts of others, as far as they make it worth more; what may not be is worth nothing."""
        best, most = scenario, worth(scenario)
        for path in self._random.sample(PARTS, len(PARTS)):
            for source in self._random.sample(self._recent, min(NUM_TRIES, len(self._recent))):
                best, most = _better(best, most, crossed(best, source, path), worth)
        tried: set[int] = set()
        while len(tried) < MOST_IN_VAIN and (number := self._most_missing(best, tried)) is not None:
            before = most
            for candidate in self._with_feature(best, number):
                best, most = _better(best, most, candidate, worth)
            tried = tried | {number} if most == before else set()
        return best

    def _most_missing(self, scenario: Scenario, tried: set[int]) -> int | None:
        """The feature that would bring the most missing pairs with those of a scenario; None where none brings any."""
        missing = {number: count for number, count in self._reach.missing_beside(scenario) if number in self._examples}
        untried = [number for number in missing if number not in tried]
        return max(untried, key=missing.__getitem__, default=None)

    def _with_feature(self, scenario: Scenario, number: int) -> Iterator[Scenario | None]:
        """With the field alone of another scenario that has it, with the noun of that field, and so on."""
        source, path = self._random.choice(self._examples[number])
        lengths = range(len(path), max(0, len(path) - NUM_LEVELS), -1)
        return (crossed(scenario, source, path[:length]) for length in lengths)


def _better(
    best: Scenario, most: float, candidate: Scenario | None, worth: Callable[[Scenario], float]
) -> tuple[Scenario, float]:
    """The one of two that is worth more, and how much."""
    now = 0.0 if candidate is None else worth(candidate)
    return (candidate, now) if candidate is not None and now > most else (best, most)
