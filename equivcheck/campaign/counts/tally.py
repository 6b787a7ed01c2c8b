"""Counts that workers send and their supervisor adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from equivcheck.campaign.counts.histogram import Histogram
from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.findings.fingerprint import blur
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.scenario.case import Case


@dataclass(slots=True)
class Tally:
    """What came of a number of checks."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    """Checks by name of the layout, or `tensor_program`, and outcome."""
    durations: dict[str, Histogram] = field(default_factory=dict)
    """Seconds of checks by the same name."""
    errors: dict[tuple[str, ...], Histogram] = field(default_factory=dict)
    """Largest errors of equivalent checks, in units of their tolerance, by what cases are counted by: layout and optimizer."""
    beyond: Counter[Outcome] = field(default_factory=Counter)
    """Checks beyond limits of torch by outcome; no other figure but those of findings includes them."""
    known: Counter[str] = field(default_factory=Counter)
    """Checks that showed a known upstream issue, by its identifier."""
    told: Counter[str] = field(default_factory=Counter)
    """Checks that told whether a known issue shows, by its identifier: they had what it needs, and ended as no other."""
    avoided: Counter[str] = field(default_factory=Counter)
    """Checks of scenarios that were changed so that a known issue cannot show, by its identifier."""
    reasons: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    """Why checks were inconclusive or unsupported, or equivalent up to some step; numbers left out."""
    fingerprints: Counter[str] = field(default_factory=Counter)
    """How often each finding showed."""
    slowest_seconds: float = 0.0
    """Duration of the slowest check."""
    slowest: Case | None = None
    """Its case; None before the first check."""
    nearest_error: float = 0.0
    """Largest error of an equivalent check, in units of its tolerance: at 1 it would be a divergence."""
    nearest: Case | None = None
    """Its case; None before the first equivalent check."""
    reach: Reach = field(default_factory=Reach)
    """Which pairs of features came together in the scenarios that were checked."""
    signatures: set[str] = field(default_factory=set)
    """What ranks did in trainings: calls that followed each other, and what DTensor worked out."""
    programs: ProgramReach = field(default_factory=ProgramReach)
    """Which operations ran in the tensor programs that were checked, under which placements."""
    not_repeated: int = 0
    """Failures of a worker or of ranks where the same case passes alone: the machine's, and in no other figure."""
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

    def errors_of(self, name: str | None = None) -> Histogram:
        """The same of one layout or one optimizer, or of all."""
        found = Histogram()
        for names, errors in self.errors.items():
            if name is None or name in names:
                found.merge(errors)
        return found

    def add(self, verdict: CaseVerdict, seconds: float, *, told: Collection[str] = (), avoided: Collection[str] = ()) -> None:
        """Count a check that took so long, told of some known issues whether they show, and avoided others."""
        if verdict.beyond:
            self.beyond[verdict.outcome] += 1
            return
        names = verdict.case.counted_by
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
        self.told.update(told)
        self.avoided.update(avoided)
        if isinstance(verdict, Verdict):
            self.reach.add(verdict.scenario)
            self.signatures.update(verdict.signature)
        elif isinstance(verdict, ProgramVerdict):
            self.programs.add_checked(verdict)
        self._note_slowest(seconds, verdict.case)

    def merge(self, other: Tally) -> None:
        """Count another tally's checks too."""
        self.outcomes.update(other.outcomes)
        for layout, durations in other.durations.items():
            self.durations.setdefault(layout, Histogram()).merge(durations)
        for names, errors in other.errors.items():
            self.errors.setdefault(names, Histogram()).merge(errors)
        self.beyond.update(other.beyond)
        self.known.update(other.known)
        self.told.update(other.told)
        self.avoided.update(other.avoided)
        self.reasons.update(other.reasons)
        self.fingerprints.update(other.fingerprints)
        self.reach.merge(other.reach)
        self.signatures |= other.signatures
        self.programs.merge(other.programs)
        self.not_repeated += other.not_repeated
        self.num_shrinking += other.num_shrinking
        self._note_slowest(other.slowest_seconds, other.slowest)
        self._note_nearest(other.nearest_error, other.nearest)

    def _note_slowest(self, seconds: float, case: Case | None) -> None:
        if case is not None and seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, case

    def _note_nearest(self, error: float, case: Case | None) -> None:
        if case is not None and error > self.nearest_error:
            self.nearest_error, self.nearest = error, case
