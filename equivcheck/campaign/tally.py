"""Counts that workers send and their supervisor adds up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from equivcheck.coverage.reach import Reach
from equivcheck.findings.fingerprint import blur
from equivcheck.scenario import Scenario
from equivcheck.verdict.verdict import Outcome, Verdict

_LOG_RATIO = math.log(1.05)
"""Width of a bucket of durations: a quantile is off by at most 2.5 %."""


class Durations:
    """A histogram of durations in seconds, exact enough for quantiles and small enough to send."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[math.floor(math.log(max(seconds, 1e-6)) / _LOG_RATIO)] += 1

    def merge(self, other: Durations) -> None:
        """Count another histogram's durations too."""
        self._buckets.update(other._buckets)

    def quantile(self, share: float) -> float:
        """The duration that a share (0 to 1) of all does not exceed; NaN if there is none."""
        left = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return math.exp((bucket + 0.5) * _LOG_RATIO)
        return math.nan


@dataclass(slots=True)
class Tally:
    """What came of a number of checks."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    """Checks by name of the layout and outcome."""
    durations: dict[str, Durations] = field(default_factory=dict)
    """Durations of checks by name of the layout."""
    beyond: Counter[Outcome] = field(default_factory=Counter)
    """Checks beyond limits of torch by outcome; no other figure but those of findings includes them."""
    known: Counter[str] = field(default_factory=Counter)
    """Checks that showed a known upstream issue, by its identifier."""
    reasons: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    """Why checks were inconclusive or unsupported, or equivalent up to some step; numbers left out."""
    fingerprints: Counter[str] = field(default_factory=Counter)
    """How often each finding showed."""
    slowest_seconds: float = 0.0
    """Duration of the slowest check."""
    slowest: Scenario | None = None
    """Its scenario; None before the first check."""
    reach: Reach = field(default_factory=Reach)
    """Which pairs of features came together in what was checked."""
    not_repeated: int = 0
    """Failures of a worker or of ranks where the same scenario passes alone: the machine's, and in no other figure."""
    num_shrinking: int = 0
    """Checks that were spent on shrinking; no other figure includes them."""

    @property
    def num_checks(self) -> int:
        """All checks but those of shrinking."""
        return self.outcomes.total()

    @property
    def num_undecided(self) -> int:
        """Checks that are equivalent up to some step, after which nothing could be decided."""
        return sum(number for (outcome, _), number in self.reasons.items() if outcome is Outcome.EQUIVALENT)

    def add(self, verdict: Verdict, seconds: float) -> None:
        """Count a check that took so long."""
        if verdict.beyond:
            self.beyond[verdict.outcome] += 1
            return
        layout = verdict.scenario.layout.name
        self.outcomes[layout, verdict.outcome] += 1
        self.durations.setdefault(layout, Durations()).add(seconds)
        if verdict.outcome is Outcome.KNOWN:
            self.known[verdict.known] += 1
        elif verdict.outcome in (Outcome.INCONCLUSIVE, Outcome.UNSUPPORTED):
            self.reasons[verdict.outcome, blur(verdict.reason)] += 1
        elif verdict.undecided:
            self.reasons[verdict.outcome, blur(verdict.undecided)] += 1
        self.reach.add(verdict.scenario)
        self._note_slowest(seconds, verdict.scenario)

    def merge(self, other: Tally) -> None:
        """Count another tally's checks too."""
        self.outcomes.update(other.outcomes)
        for layout, durations in other.durations.items():
            self.durations.setdefault(layout, Durations()).merge(durations)
        self.beyond.update(other.beyond)
        self.known.update(other.known)
        self.reasons.update(other.reasons)
        self.fingerprints.update(other.fingerprints)
        self.reach.merge(other.reach)
        self.not_repeated += other.not_repeated
        self.num_shrinking += other.num_shrinking
        self._note_slowest(other.slowest_seconds, other.slowest)

    def _note_slowest(self, seconds: float, scenario: Scenario | None) -> None:
        if scenario is not None and seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, scenario
