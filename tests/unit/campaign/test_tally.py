"""Adding up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from equivcheck.campaign.tally import Durations, Tally
from equivcheck.verdict.verdict import Outcome, Verdict
from unit.campaign import fakes


def verdict(outcome: Outcome, **values: str) -> Verdict:
    """A verdict on a small scenario."""
    return Verdict(outcome=outcome, scenario=fakes.scenario(), world="sim", **values)


def test_quantiles_are_within_their_stated_error() -> None:
    """The histogram's quantiles are off by at most 2.5 %."""
    durations = Durations()
    for number in range(1, 1001):
        durations.add(number / 1000)
    assert durations.quantile(0.5) == pytest.approx(0.5, rel=0.026)
    assert durations.quantile(0.95) == pytest.approx(0.95, rel=0.026)


def test_nothing_has_no_quantile() -> None:
    """Of no duration every quantile is NaN."""
    assert math.isnan(Durations().quantile(0.5))


def test_merging_is_adding() -> None:
    """Two tallies merged are the tally of all their checks."""
    verdicts = [
        verdict(Outcome.EQUIVALENT),
        verdict(Outcome.KNOWN, known="torch-1"),
        verdict(Outcome.INCONCLUSIVE, reason="floor is 0.25"),
        verdict(Outcome.INCONCLUSIVE, reason="floor is 0.5"),
        verdict(Outcome.EQUIVALENT, undecided="not decided from step 2 on"),
    ]
    parts = (Tally(), Tally())
    whole = Tally()
    for number, one in enumerate(verdicts):
        parts[number % 2].add(one, 0.1 * (number + 1))
        whole.add(one, 0.1 * (number + 1))
    parts[0].merge(parts[1])
    assert parts[0].outcomes == whole.outcomes
    assert parts[0].known == {"torch-1": 1}
    assert parts[0].reasons == {(Outcome.INCONCLUSIVE, "floor is N"): 2, (Outcome.EQUIVALENT, "not decided from step N on"): 1}
    assert parts[0].num_undecided == 1
    assert parts[0].slowest_seconds == pytest.approx(0.5)
    assert parts[0].num_checks == 5
    assert parts[0].durations["ddp"].quantile(0.99) == whole.durations["ddp"].quantile(0.99)


def test_the_slowest_scenario_is_kept() -> None:
    """Of all checks the scenario of the slowest is remembered, also after a merge with a quicker one."""
    slow = replace(verdict(Outcome.EQUIVALENT), scenario=fakes.scenario(ranks=8))
    tally, other = Tally(), Tally()
    tally.add(slow, 2.0)
    other.add(verdict(Outcome.EQUIVALENT), 1.0)
    tally.merge(other)
    assert tally.slowest == slow.scenario
