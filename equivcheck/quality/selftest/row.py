"""What a selftest says of each mutant, and of all."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import Scenario

SLACK = 1
"""Ranks, layers and steps that a shrunk scenario may have more than the known minimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What is left of a scenario in which a mutant was caught."""

    scenario: Scenario
    """The smallest that was found."""
    outcome: Outcome
    """What the full judgement says of it."""
    minimum: Minimum
    """What is known to be the least."""
    options: tuple[str, ...]
    """Settings that are not at their default, in words."""
    seconds: float
    """Time that it took."""
    checks: int
    """Checks that it took."""

    @property
    def ranks(self) -> int:
        """Ranks left."""
        return self.scenario.layout.mesh.num_ranks

    @property
    def layers(self) -> int:
        """Layers left."""
        return len(self.scenario.training.model.layers)

    @property
    def steps(self) -> int:
        """Steps left."""
        return self.scenario.training.steps

    @property
    def widths(self) -> tuple[int, ...]:
        """Features, then the width of each layer."""
        return self.scenario.training.model.widths

    @property
    def is_small(self) -> bool:
        """Whether there is at most one rank, one layer and one step more than it takes."""
        least = self.minimum
        return all(
            left <= needed + SLACK
            for left, needed in ((self.ranks, least.ranks), (self.layers, least.layers), (self.steps, least.steps))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLayout:
    """Reachable scenarios of one layout."""

    name: str
    """Of the layout."""
    reachable: int = 0
    """How many."""
    caught: int = 0
    """Those with a finding."""
    undecided: int = 0
    """As `Row.undecided`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one mutant."""

    name: str
    """The mutant's."""
    family: Family
    """What part of a training is wrong."""
    drawn: int = 0
    """Scenarios drawn."""
    reachable: int = 0
    """Those in which the mutant changes a bit of what any rank leaves, or makes ranks fail."""
    caught: int = 0
    """Reachable ones with a finding."""
    undecided: int = 0
    """Reachable ones without, of which the honest training is not known to be right either: inconclusive, known, unsupported."""
    layouts: tuple[OfLayout, ...] = ()
    """The same of each layout that came up, in the order of coming up."""
    examples: int = 0
    """Scenarios drawn until the first catch, that one included; 0 without a catch."""
    seconds: float = 0.0
    """Of work until the first catch; of all drawing without a catch."""
    survivor: Scenario | None = None
    """The smallest reachable scenario in which an equivalent training was broken and nothing found; None if there is none."""
    shrunk: Shrunk | None = None
    """What is left of a catch; None without one."""
    expected: tuple[Cause, ...] = ()
    """Right diagnoses, the first the best."""
    given: Diagnosis | None = None
    """The diagnosis of the shrunk scenario."""
    broken: str = ""
    """Why the examination ended early; empty if it did not."""

    @classmethod
    def of(cls, mutant: Mutant) -> Row:
        """That of a mutant of which nothing is known yet."""
        return cls(name=mutant.name, family=mutant.family, expected=mutant.causes)

    def with_scenario(self, layout: str, *, caught: int, undecided: int) -> Row:
        """With one more reachable scenario of a layout, which was caught, or left undecided, or neither."""
        of = {each.name: each for each in self.layouts}
        before = of.get(layout, OfLayout(name=layout))
        of[layout] = OfLayout(
            name=layout,
            reachable=before.reachable + 1,
            caught=before.caught + caught,
            undecided=before.undecided + undecided,
        )
        return replace(self, layouts=tuple(of.values()))

    @property
    def survived(self) -> int:
        """Reachable scenarios in which the mutant should have been caught, and was not."""
        return self.reachable - self.caught - self.undecided

    @property
    def is_killed(self) -> bool:
        """Whether the mutant was caught at all."""
        return self.caught > 0

    @property
    def is_explained(self) -> bool:
        """Whether the diagnosis given is a right one."""
        return self.given is not None and self.given.cause in self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Selftest:
    """What came of all mutants asked for."""

    rows: tuple[Row, ...]
    """One a mutant, in the order asked for; those not begun before an interruption are left out."""
    asked: int
    """Mutants asked for."""
    seed: int
    """What was drawn by."""
    seconds: float
    """Time of all."""
    interrupted: bool = False
    """Whether it was stopped before the end."""

    @property
    def num_reached(self) -> int:
        """Mutants that changed something in a scenario."""
        return sum(row.reachable > 0 for row in self.rows)

    @property
    def num_killed(self) -> int:
        """Mutants that were caught."""
        return sum(row.is_killed for row in self.rows)

    @property
    def reached_rate(self) -> float:
        """Mutants reached over mutants examined; a mutant never reached is a failure of the generator."""
        return _share(self.num_reached, len(self.rows))

    @property
    def kill_rate(self) -> float:
        """Mutants caught over mutants reached; one reached and not caught is a failure of the oracle."""
        return _share(self.num_killed, self.num_reached)

    @property
    def caught_rate(self) -> float:
        """Scenarios caught over scenarios reached, those left out that are undecided."""
        return _share(sum(row.caught for row in self.rows), sum(row.reachable - row.undecided for row in self.rows))

    @property
    def diagnosis_rate(self) -> float:
        """Mutants with a right diagnosis over mutants caught."""
        return _share(sum(row.is_explained for row in self.rows), self.num_killed)

    @property
    def num_small(self) -> int:
        """Shrunk scenarios within one rank, one layer and one step of the least."""
        return sum(row.shrunk is not None and row.shrunk.is_small for row in self.rows)

    @property
    def median_examples(self) -> float:
        """Of the examples until the first catch; 0 without a catch."""
        found = [row.examples for row in self.rows if row.is_killed]
        return statistics.median(found) if found else 0.0

    @property
    def worst_examples(self) -> int:
        """The most examples until a first catch; 0 without a catch."""
        return max((row.examples for row in self.rows), default=0)

    @property
    def is_passed(self) -> bool:
        """Whether every mutant asked for was reached and killed."""
        return self.num_killed == self.asked and not any(row.broken for row in self.rows)


def _share(part: int, whole: int) -> float:
    """A share from 0 to 1; 0 of nothing."""
    return part / whole if whole else 0.0
