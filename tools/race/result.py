"""Race results: campaigns, and each mutant's first catch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from equivcheck.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Length per campaign. Raises `UsageError` if `seconds` is not above 0."""

    seconds: float = 300.0
    """CPU time per campaign. A mutant without a catch by then counts as not caught."""
    mutants: tuple[str, ...]
    """Mutant names."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"Distance.seconds {self.seconds} is not valid. Expected a number above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """A mutant's first catch in a campaign."""

    seconds: float
    """The campaign's CPU time up to the catch, without its start."""
    checks: int
    """Checks up to and including the catch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """One campaign, checked with every mutant."""

    seed: int
    """Seed for generated scenarios."""
    seconds: float = 0.0
    """CPU time that it spent."""
    checks: int = 0
    """Checks done."""
    catches: tuple[tuple[str, Catch], ...] = ()
    """Mutants with their first catches, in order."""
    broken: str = ""
    """Reason why it ended early; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Results from all campaigns."""

    campaigns: tuple[CampaignRun, ...]
    """One for each seed."""
    distance: Distance
    """Planned length."""
    interrupted: bool = False
    """Whether a signal ended the race early."""

    def catches(self, name: str) -> tuple[Catch, ...]:
        """One mutant's first catches, at most one per campaign."""
        return tuple(catch for campaign in self.campaigns for other, catch in campaign.catches if other == name)

    def seconds(self, name: str) -> float:
        """Mean CPU time to a mutant's first catch. A campaign without a catch counts with all its time."""
        caught = [catch.seconds for catch in self.catches(name)]
        missed = [campaign.seconds for campaign in self.campaigns if name not in dict(campaign.catches)]
        return statistics.fmean((*caught, *missed)) if self.campaigns else 0.0

    @property
    def all_seconds(self) -> list[float]:
        """Mean CPU time per mutant, sorted."""
        return sorted(map(self.seconds, self.distance.mutants))

    @property
    def median(self) -> float:
        """CPU seconds in which half the mutants are caught."""
        return statistics.median(self.all_seconds)

    @property
    def p90(self) -> float:
        """CPU seconds in which 90 % of the mutants are caught."""
        return self.all_seconds[max(0, -(-9 * len(self.all_seconds) // 10) - 1)]

    @property
    def total(self) -> float:
        """Sum over all mutants' mean CPU times."""
        return sum(self.all_seconds)

    @property
    def never_caught(self) -> tuple[str, ...]:
        """Mutants that no campaign has caught."""
        return tuple(name for name in self.distance.mutants if not self.catches(name))

    @property
    def is_passed(self) -> bool:
        """Whether some campaign caught every mutant, and no campaign ended early."""
        return not self.never_caught and not any(campaign.broken for campaign in self.campaigns)
