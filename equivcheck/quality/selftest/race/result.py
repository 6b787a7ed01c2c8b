"""What a race says of each campaign, each mutant, and all."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from equivcheck.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far each campaign of a race goes."""

    seconds: float = 300.0
    """CPU time of each campaign, above 0, after which mutants that it has not caught count as not caught."""
    mutants: tuple[str, ...]
    """Names of the mutants that take part."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"Distance.seconds is {self.seconds}; allowed: above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """The first catch of a mutant in a campaign."""

    seconds: float
    """CPU time that the campaign had spent by then, its start excepted."""
    checks: int
    """Checks that it had made by then, the one of the catch among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """One campaign with every mutant."""

    seed: int
    """What it drew by."""
    seconds: float = 0.0
    """CPU time that it spent."""
    checks: int = 0
    """Checks that it made."""
    catches: tuple[tuple[str, Catch], ...] = ()
    """First catches by name of the mutant, in their order."""
    broken: str = ""
    """Why it ended early; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What came of all campaigns."""

    campaigns: tuple[CampaignRun, ...]
    """By seed."""
    distance: Distance
    """How far they were to go."""
    interrupted: bool = False
    """Whether it was stopped before the end."""

    def catches(self, name: str) -> tuple[Catch, ...]:
        """Those of one mutant."""
        return tuple(catch for campaign in self.campaigns for other, catch in campaign.catches if other == name)

    def seconds(self, name: str) -> float:
        """Mean CPU time to the first catch of a mutant; at least that, where a campaign has not caught it."""
        caught = [catch.seconds for catch in self.catches(name)]
        missed = [campaign.seconds for campaign in self.campaigns if name not in dict(campaign.catches)]
        return statistics.fmean((*caught, *missed)) if self.campaigns else 0.0

    @property
    def all_seconds(self) -> list[float]:
        """Those of all mutants, the least first."""
        return sorted(map(self.seconds, self.distance.mutants))

    @property
    def median(self) -> float:
        """CPU seconds in which half of the mutants are caught."""
        return statistics.median(self.all_seconds)

    @property
    def most_of_nine_in_ten(self) -> float:
        """CPU seconds in which nine of ten mutants are caught."""
        return self.all_seconds[max(0, -(-9 * len(self.all_seconds) // 10) - 1)]

    @property
    def total(self) -> float:
        """CPU seconds of all mutants together."""
        return sum(self.all_seconds)

    @property
    def never_caught(self) -> tuple[str, ...]:
        """Mutants that no campaign has caught."""
        return tuple(name for name in self.distance.mutants if not self.catches(name))

    @property
    def is_passed(self) -> bool:
        """Whether every mutant was caught by some campaign."""
        return not self.never_caught and not any(campaign.broken for campaign in self.campaigns)
