"""Results of a selftest, per mutant and in total."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import Scenario

SLACK = 1
"""Extra ranks, layers and steps allowed in a shrunk scenario beyond the known minimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkScenario:
    """Smallest scenario found for a caught mutant."""

    scenario: Scenario
    """The scenario."""
    outcome: Outcome
    """Outcome from a full check."""
    minimum: Minimum
    """Size of the smallest scenario known to show the mutant."""
    options: tuple[str, ...]
    """Options not at their defaults, as text."""
    seconds: float
    """Seconds spent on shrinking."""
    checks: int
    """Checks spent on shrinking."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.scenario.layout.mesh.num_ranks

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self.scenario.training.model.layers)

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.scenario.training.steps

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of features, then each layer's width."""
        return self.scenario.training.model.widths

    @property
    def is_small(self) -> bool:
        """Whether the scenario has at most one rank, one layer and one step more than `minimum`."""
        least = self.minimum
        return all(
            left <= needed + SLACK
            for left, needed in ((self.ranks, least.ranks), (self.layers, least.layers), (self.steps, least.steps))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """Counts of scenarios with one mutant under one layout."""

    name: str
    """Layout name."""
    reachable: int = 0
    """Scenarios in which the mutant has an effect."""
    caught: int = 0
    """Scenarios with an effect in which the check reports a finding."""
    undecided: int = 0
    """Scenarios with an effect but no finding, and no clear verdict without the mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResult:
    """Result for one mutant."""

    name: str
    """Mutant name."""
    family: Family
    """Training part that the mutant breaks."""
    drawn: int = 0
    """Number of scenarios drawn."""
    reachable: int = 0
    """Scenarios in which the mutant changes a bit in any rank's trace, or makes ranks fail."""
    caught: int = 0
    """Scenarios in which the mutant has an effect and the check reports a finding."""
    undecided: int = 0
    """Scenarios with an effect but no finding, and no clear verdict without the mutant: inconclusive, known or unsupported."""
    layouts: tuple[LayoutResult, ...] = ()
    """Results per layout, in the order of their first scenario."""
    examples: int = 0
    """Scenarios drawn up to and including the first catch; 0 without a catch."""
    seconds: float = 0.0
    """Seconds of work up to the first catch; for all drawing if there is no catch."""
    survivor: Scenario | None = None
    """Smallest scenario in which the mutant had an effect and was missed; None if no scenario was missed."""
    shrunk: ShrunkScenario | None = None
    """Smallest scenario after shrinking a catch; None without a catch."""
    expected: tuple[Cause, ...] = ()
    """Correct diagnoses, best first."""
    given: Diagnosis | None = None
    """Diagnosis of the shrunk scenario; None if there is none."""
    broken: str = ""
    """Reason why the examination ended early; empty if it did not."""

    @classmethod
    def of(cls, mutant: Mutant) -> MutantResult:
        """Return an empty result for a mutant."""
        return cls(name=mutant.name, family=mutant.family, expected=mutant.causes)

    def with_scenario(self, layout: str, *, caught: int, undecided: int) -> MutantResult:
        """Return the result with one more scenario, in which the mutant has an effect.

        `layout` is its layout's name. `caught` is 1 if the mutant was caught, and `undecided` is 1 if the check could not decide.
        """
        of = {each.name: each for each in self.layouts}
        before = of.get(layout, LayoutResult(name=layout))
        of[layout] = LayoutResult(
            name=layout,
            reachable=before.reachable + 1,
            caught=before.caught + caught,
            undecided=before.undecided + undecided,
        )
        return replace(self, layouts=tuple(of.values()))

    @property
    def num_missed(self) -> int:
        """Count scenarios in which the mutant had an effect and was missed."""
        return self.reachable - self.caught - self.undecided

    @property
    def is_killed(self) -> bool:
        """Whether the mutant was caught in at least one scenario."""
        return self.caught > 0

    @property
    def is_explained(self) -> bool:
        """Whether the diagnosis gives a correct cause."""
        return self.given is not None and self.given.cause in self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestResult:
    """Results for all chosen mutants."""

    rows: tuple[MutantResult, ...]
    """One row per mutant, in the chosen order. An interruption leaves out mutants that were not begun."""
    asked: int
    """Number of chosen mutants."""
    seed: int
    """Seed for drawing scenarios."""
    seconds: float
    """Duration in seconds for the whole selftest."""
    interrupted: bool = False
    """Whether a signal ended the selftest early."""

    @property
    def num_reached(self) -> int:
        """Count mutants that had an effect in at least one scenario."""
        return sum(row.reachable > 0 for row in self.rows)

    @property
    def num_killed(self) -> int:
        """Count mutants that were caught."""
        return sum(row.is_killed for row in self.rows)

    @property
    def reached_rate(self) -> float:
        """Return the fraction of mutants with an effect in at least one scenario.

        If a mutant never has an effect, the scenario generator is to blame.
        """
        return _share(self.num_reached, len(self.rows))

    @property
    def kill_rate(self) -> float:
        """Return the fraction of mutants that were caught, among mutants that had an effect.

        If one was missed, the oracle is to blame.
        """
        return _share(self.num_killed, self.num_reached)

    @property
    def caught_rate(self) -> float:
        """Return how often a mutant with an effect was caught, as a fraction of scenarios.

        Undecided scenarios are not counted.
        """
        return _share(sum(row.caught for row in self.rows), sum(row.reachable - row.undecided for row in self.rows))

    @property
    def diagnosis_rate(self) -> float:
        """Return the fraction of correctly diagnosed mutants, among caught mutants."""
        return _share(sum(row.is_explained for row in self.rows), self.num_killed)

    @property
    def num_small(self) -> int:
        """Count caught mutants with a small shrunk scenario (`ShrunkScenario.is_small`)."""
        return sum(row.shrunk is not None and row.shrunk.is_small for row in self.rows)

    @property
    def median_examples(self) -> float:
        """Median number of scenarios drawn until a mutant was first caught; 0 if no mutant was caught."""
        found = [row.examples for row in self.rows if row.is_killed]
        return statistics.median(found) if found else 0.0

    @property
    def worst_examples(self) -> int:
        """Return the largest number of scenarios drawn until a mutant was first caught; 0 if no mutant was caught."""
        return max((row.examples for row in self.rows), default=0)

    @property
    def is_passed(self) -> bool:
        """Whether all chosen mutants had an effect and were caught."""
        return self.num_killed == self.asked and not any(row.broken for row in self.rows)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
