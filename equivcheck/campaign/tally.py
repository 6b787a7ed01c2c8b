"""Counts of checks, and histograms. Workers send them, and the supervisor adds them up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.findings.fingerprint import blur
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.scenario.case import Checkable

_LOG_RATIO = math.log(1.05)
"""Logarithm of the bucket width. A quantile is off by at most 2.5 %."""
_SMALLEST = 1e-6
"""Smaller numbers count as 0."""
_ZERO = math.floor(math.log(_SMALLEST) / _LOG_RATIO)
"""Number of the bucket for 0."""


class Histogram:
    """Histogram of positive numbers, such as seconds or relative errors.

    A histogram is small enough to send between processes.
    """

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
        """Return the middle of each bucket with its count, smallest first."""
        return [(_middle(bucket), number) for bucket, number in sorted(self._buckets.items())]

    def quantile(self, share: float) -> float:
        """Return a quantile of the added numbers: for 0.5 as `share`, the median. NaN if there are no numbers."""
        left = share * self.count
        for bucket, number in sorted(self._buckets.items()):
            left -= number
            if left <= 0:
                return 0.0 if bucket == _ZERO else _middle(bucket)
        return math.nan


def _middle(bucket: int) -> float:
    return math.exp((bucket + 0.5) * _LOG_RATIO)


@dataclass(slots=True)
class Tally:
    """Counts of checks by outcome, with durations, errors and coverage."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    """How many checks there were for each layout name (or `tensor_program`) and outcome."""
    durations: dict[str, Histogram] = field(default_factory=dict)
    """Seconds for each check, by the same names."""
    errors: dict[tuple[str, ...], Histogram] = field(default_factory=dict)
    """Largest error in each equivalent check, relative to tolerance, by layout and optimizer."""
    beyond: Counter[Outcome] = field(default_factory=Counter)
    """Checks beyond limits, by outcome. Apart from findings, no other count includes them."""
    known: Counter[str] = field(default_factory=Counter)
    """How many checks showed each known issue, by its id."""
    decided: Counter[str] = field(default_factory=Counter)
    """How many checks gave an answer whether a known issue still exists, by its id."""
    avoided: Counter[str] = field(default_factory=Counter)
    """How many checks were changed to avoid a known issue, by its id."""
    reasons: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    """Reasons of inconclusive, unsupported and partly undecided checks, each with its count. Numbers in reasons are replaced."""
    fingerprints: Counter[str] = field(default_factory=Counter)
    """How many checks showed each finding, by its fingerprint."""
    slowest_seconds: float = 0.0
    """Duration of the slowest check."""
    slowest: Checkable | None = None
    """Case in the slowest check; None before the first check."""
    nearest_error: float = 0.0
    """Largest error in an equivalent check, relative to tolerance. A check with an error above 1 has diverged."""
    nearest: Checkable | None = None
    """Case with this error; None before the first equivalent check."""
    reach: Reach = field(default_factory=Reach)
    """Feature pairs in the checked scenarios."""
    signatures: set[str] = field(default_factory=set)
    """Signatures of the ranks' work in trainings: consecutive collective calls, and DTensor operations with placements."""
    programs: ProgramReach = field(default_factory=ProgramReach)
    """Operations and placements in the checked tensor programs."""
    not_repeated: int = 0
    """Failures not repeated when the same case ran alone. The machine caused them, so no other count includes them."""
    num_shrinking: int = 0
    """How many checks were spent on shrinking. No other count includes them."""

    @property
    def num_checks(self) -> int:
        """How many checks ran. Those spent on shrinking do not count."""
        return self.outcomes.total()

    @property
    def num_undecided(self) -> int:
        """How many checks ended as EQUIVALENT although only their first steps could be decided."""
        return sum(number for (outcome, _), number in self.reasons.items() if outcome is Outcome.EQUIVALENT)

    def errors_of(self, name: str | None = None) -> Histogram:
        """Return a histogram with one number for each equivalent check: its largest error, divided by the tolerance.

        `name` selects the checks with one layout or optimizer; None selects all checks.
        """
        found = Histogram()
        for names, errors in self.errors.items():
            if name is None or name in names:
                found.merge(errors)
        return found

    def add(self, verdict: CaseVerdict, seconds: float, *, decided: Collection[str] = (), avoided: Collection[str] = ()) -> None:
        """Count a verdict, and the check's duration in seconds.

        `decided` has the ids of known issues about which this check says whether they still exist. `avoided` has the ids of known
        issues that its case was changed to avoid.
        """
        if verdict.beyond:
            self.beyond[verdict.outcome] += 1
            return
        names = verdict.case.summary_row
        self.outcomes[names[0], verdict.outcome] += 1
        self.durations.setdefault(names[0], Histogram()).add(seconds)
        if verdict.outcome is Outcome.EQUIVALENT:
            self.errors.setdefault(names, Histogram()).add(verdict.worst_error)
            self._note_nearest(verdict.worst_error, verdict.case)
        if verdict.outcome is Outcome.KNOWN:
            self.known[verdict.known] += 1
        elif verdict.outcome in (Outcome.INCONCLUSIVE, Outcome.UNSUPPORTED):
            self.reasons[verdict.outcome, blur(verdict.reason)] += 1
        elif verdict.undecided:
            self.reasons[verdict.outcome, blur(verdict.undecided)] += 1
        self.decided.update(decided)
        self.avoided.update(avoided)
        if isinstance(verdict, Verdict):
            self.reach.add(verdict.scenario)
            self.signatures.update(verdict.signature)
        elif isinstance(verdict, ProgramVerdict):
            self.programs.add_checked(verdict)
        self._note_slowest(seconds, verdict.case)

    def merge(self, other: Tally) -> None:
        """Add another tally's counts."""
        for name in ("outcomes", "beyond", "known", "decided", "avoided", "reasons", "fingerprints"):
            getattr(self, name).update(getattr(other, name))
        for layout, durations in other.durations.items():
            self.durations.setdefault(layout, Histogram()).merge(durations)
        for names, errors in other.errors.items():
            self.errors.setdefault(names, Histogram()).merge(errors)
        self.reach.merge(other.reach)
        self.signatures |= other.signatures
        self.programs.merge(other.programs)
        self.not_repeated += other.not_repeated
        self.num_shrinking += other.num_shrinking
        self._note_slowest(other.slowest_seconds, other.slowest)
        self._note_nearest(other.nearest_error, other.nearest)

    def _note_slowest(self, seconds: float, case: Checkable | None) -> None:
        if case is not None and seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, case

    def _note_nearest(self, error: float, case: Checkable | None) -> None:
        if case is not None and error > self.nearest_error:
            self.nearest_error, self.nearest = error, case
