"""Results of a race: campaigns, and the first catch of each mutant."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from equivcheck.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Length of each campaign. Raises `UsageError` if `seconds` is not above 0."""

    seconds: float = 300.0
    """CPU time of each campaign. A mutant without a catch by then counts as not caught."""
    mutants: tuple[str, ...]
    """Names of the mutants in the race."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"Distance.seconds {self.seconds} is not valid. Expected a number above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """First catch of a mutant in a campaign."""

    seconds: float
    """CPU time of the campaign up to the catch, without its start."""
    checks: int
    """Number of checks up to the catch, including the one that caught it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """One campaign, checked with every mutant."""

    seed: int
    """Seed of the generated scenarios."""
    seconds: float = 0.0
    """CPU time that it spent."""
    checks: int = 0
    """Number of checks."""
    catches: tuple[tuple[str, Catch], ...] = ()
    """Mutants with their first catches, in the order of the catches."""
    broken: str = ""
    """Reason why it ended early; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Results of all campaigns."""

    campaigns: tuple[CampaignRun, ...]
    """One for each seed."""
    distance: Distance
    """Planned length of the campaigns."""
    interrupted: bool = False
    """Whether a signal ended the race early."""

    def catches(self, name: str) -> tuple[Catch, ...]:
        """First catches of one mutant, at most one for each campaign."""
        return tuple(catch for campaign in self.campaigns for other, catch in campaign.catches if other == name)

    def seconds(self, name: str) -> float:
        """Mean CPU time to the first catch of a mutant. A campaign without a catch counts with all its time."""
        caught = [catch.seconds for catch in self.catches(name)]
        missed = [campaign.seconds for campaign in self.campaigns if name not in dict(campaign.catches)]
        return statistics.fmean((*caught, *missed)) if self.campaigns else 0.0

    @property
    def all_seconds(self) -> list[float]:
        """Mean CPU times of all mutants, sorted."""
        return sorted(map(self.seconds, self.distance.mutants))

    @property
    def median(self) -> float:
        """CPU seconds in which half of the mutants are caught."""
        return statistics.median(self.all_seconds)

    @property
    def p90(self) -> float:
        """CPU seconds in which nine of ten mutants are caught."""
        return self.all_seconds[max(0, -(-9 * len(self.all_seconds) // 10) - 1)]

    @property
    def total(self) -> float:
        """Sum of the mean CPU times of all mutants."""
        return sum(self.all_seconds)

    @property
    def never_caught(self) -> tuple[str, ...]:
        """Mutants that no campaign has caught."""
        return tuple(name for name in self.distance.mutants if not self.catches(name))

    @property
    def is_passed(self) -> bool:
        """Whether some campaign caught every mutant, and no campaign ended early."""
        return not self.never_caught and not any(campaign.broken for campaign in self.campaigns)
