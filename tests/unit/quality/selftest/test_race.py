"""How much CPU time campaigns take to catch mutants."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from equivcheck.errors import UsageError
from equivcheck.quality.selftest.race import campaign
from equivcheck.quality.selftest.race.campaign import run_campaign
from equivcheck.quality.selftest.race.result import CampaignRun, Catch, Distance, Race

SOON, LATE, NEVER = "gradients_summed", "reduction_missing", "state_lost"


def of(**catches: float) -> tuple[tuple[str, Catch], ...]:
    """Catches at so many CPU seconds."""
    return tuple((name, Catch(seconds=seconds, checks=int(seconds))) for name, seconds in catches.items())


RACE = Race(
    campaigns=(
        CampaignRun(seed=0, seconds=100.0, checks=100, catches=of(gradients_summed=2.0, reduction_missing=10.0)),
        CampaignRun(seed=1, seconds=100.0, checks=100, catches=of(gradients_summed=4.0)),
    ),
    distance=Distance(seconds=100.0, mutants=(SOON, LATE, NEVER)),
)


@pytest.mark.slow
def test_a_campaign_catches_each_mutant_once_and_ends_with_the_last() -> None:
    """Each is caught at a check that was made, later ones no earlier, and nothing is checked after the last."""
    told: list[CampaignRun] = []
    run = run_campaign(2, Distance(seconds=1e9, mutants=(SOON, LATE)), told.append)
    assert {name for name, _ in run.catches} == {SOON, LATE}
    reached = [(catch.checks, catch.seconds) for _, catch in run.catches]
    assert reached == sorted(reached)
    assert reached[-1][0] == run.checks
    assert [each.checks for each in told] == list(range(1, run.checks + 1))


class SecondsEachLook:
    """A clock that goes on by a second whenever it is looked at: real ones stand still for hundredths."""

    def __init__(self) -> None:
        self._seconds = count(1.0)

    @property
    def seconds(self) -> float:
        """Since its making."""
        return next(self._seconds)


@pytest.mark.parametrize("num_checks", [1, 3])
def test_a_campaign_ends_when_its_time_is_spent(num_checks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the check at which that is reached; what none has shown is not caught."""
    monkeypatch.setattr(campaign, "WorkClock", SecondsEachLook)
    monkeypatch.setattr(campaign, "_may_show", lambda *_: False)
    run = run_campaign(3, Distance(seconds=num_checks, mutants=(LATE,)))
    assert (run.checks, run.catches) == (num_checks, ())


def test_a_campaign_that_does_not_catch_a_mutant_counts_with_all_it_spent() -> None:
    """The mean over campaigns, at least that of those that caught it, and what none caught is named."""
    assert [RACE.seconds(name) for name in (SOON, LATE, NEVER)] == [3.0, 55.0, 100.0]
    assert (RACE.median, RACE.most_of_nine_in_ten, RACE.total) == (55.0, 100.0, 158.0)
    assert RACE.never_caught == (NEVER,)
    assert not RACE.is_passed


def test_a_race_passes_if_every_mutant_is_caught_and_no_campaign_breaks() -> None:
    """One catch in any campaign is enough for a mutant; a campaign that did not come to its end is not enough."""
    passed = replace(RACE, distance=replace(RACE.distance, mutants=(SOON, LATE)))
    assert passed.is_passed
    assert not replace(passed, campaigns=(*passed.campaigns, CampaignRun(seed=2, broken="it died"))).is_passed


def test_a_distance_of_no_time_is_refused() -> None:
    """It is above 0."""
    with pytest.raises(UsageError, match="allowed: above 0"):
        Distance(seconds=0.0, mutants=(SOON,))
