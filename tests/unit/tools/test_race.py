"""How much CPU time campaigns take to catch mutants."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from json import loads

import pytest
from click.testing import CliRunner

from equivcheck.errors import UsageError
from tools.race import campaign
from tools.race.__main__ import main
from tools.race.campaign import run_campaign
from tools.race.result import CampaignRun, Catch, Distance, Race

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
    assert (RACE.median, RACE.p90, RACE.total) == (55.0, 100.0, 158.0)
    assert RACE.never_caught == (NEVER,)
    assert not RACE.is_passed


def test_a_race_passes_if_every_mutant_is_caught_and_no_campaign_breaks() -> None:
    """One catch in any campaign is enough for a mutant; a campaign that did not come to its end is not enough."""
    passed = replace(RACE, distance=replace(RACE.distance, mutants=(SOON, LATE)))
    assert passed.is_passed
    assert not replace(passed, campaigns=(*passed.campaigns, CampaignRun(seed=2, broken="it died"))).is_passed


def test_a_distance_of_no_time_is_refused() -> None:
    """It is above 0."""
    with pytest.raises(UsageError, match=r"seconds 0\.0 is not valid"):
        Distance(seconds=0.0, mutants=(SOON,))


@pytest.mark.slow
def test_the_command_prints_when_each_mutant_was_caught() -> None:
    """One object on stdout with the CPU seconds and checks of each campaign, one line each on stderr; without --json a table."""
    arguments = ("--seconds", "1000", "--campaigns", "1", "--seed", "4", "--mutants", SOON, "--workers", "1")
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = loads(result.stdout)
    (mutant,) = found["mutants"]
    (only,) = found["campaigns"]
    assert (mutant["name"], mutant["caught"], mutant["checks"]) == (SOON, 1, [only["checks"]])
    assert 0 < mutant["mean_seconds"] == found["median_seconds"] == found["p90_seconds"] == found["total_seconds"]
    assert "1/1 seed 4: 1 mutant caught in" in result.stderr
    assert "CPU seconds to the first catch of 1 mutant: median" in CliRunner().invoke(main, arguments).stdout


@pytest.mark.parametrize("option", ["--seconds", "--campaigns", "--workers"])
def test_a_command_for_nothing_is_refused(option: str) -> None:
    """Exit code 2, and the error names the option."""
    result = CliRunner().invoke(main, [option, "0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert option in result.stderr
