"""Adding up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.campaign.tally import Tally
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from unit.campaign import fakes


def verdict(outcome: Outcome, **values: str) -> Verdict:
    """A verdict on a small scenario."""
    return Verdict(outcome=outcome, scenario=fakes.scenario(), world="sim", **values)


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
        parts[number % 2].add(one, 0.1 * (number + 1), decided=(one.known,), avoided=("torch-2",))
        whole.add(one, 0.1 * (number + 1))
    parts[0].merge(parts[1])
    assert parts[0].outcomes == whole.outcomes
    assert parts[0].known == {"torch-1": 1}
    assert parts[0].decided == {"torch-1": 1, "": 4}
    assert parts[0].avoided == {"torch-2": 5}
    assert parts[0].reasons == {(Outcome.INCONCLUSIVE, "floor is N"): 2, (Outcome.EQUIVALENT, "not decided from step N on"): 1}
    assert parts[0].num_undecided == 1
    assert parts[0].slowest_seconds == pytest.approx(0.5)
    assert parts[0].num_checks == 5
    assert parts[0].durations["ddp"].quantile(0.99) == whole.durations["ddp"].quantile(0.99)


def test_errors_are_counted_of_what_is_equivalent() -> None:
    """Of equivalent checks the largest error counts, for its layout and for its optimizer; of others none does."""
    tally = Tally()
    tally.add(replace(verdict(Outcome.EQUIVALENT), worst_error=0.25), 1.0)
    tally.add(replace(verdict(Outcome.DIVERGED), worst_error=4.0), 1.0)
    for name in ("ddp", "SGD", None):
        assert tally.errors_of(name).quantile(1.0) == pytest.approx(0.25, rel=0.026)
    assert tally.errors_of("fsdp2").count == 0


def test_the_slowest_scenario_is_kept() -> None:
    """Of all checks the scenario of the slowest is remembered, also after a merge with a quicker one."""
    slow = replace(verdict(Outcome.EQUIVALENT), scenario=fakes.scenario(ranks=8))
    tally, other = Tally(), Tally()
    tally.add(slow, 2.0)
    other.add(verdict(Outcome.EQUIVALENT), 1.0)
    tally.merge(other)
    assert tally.slowest == slow.scenario


def test_the_scenario_nearest_to_a_divergence_is_kept() -> None:
    """Of equivalent checks the scenario with the largest error is remembered, also after a merge; no divergence is."""
    near = replace(verdict(Outcome.EQUIVALENT), scenario=fakes.scenario(ranks=8), worst_error=0.9)
    tally, other = Tally(), Tally()
    other.add(near, 1.0)
    other.add(replace(verdict(Outcome.DIVERGED), worst_error=4.0), 1.0)
    tally.add(replace(verdict(Outcome.EQUIVALENT), worst_error=0.5), 1.0)
    tally.merge(other)
    assert (tally.nearest, tally.nearest_error) == (near.scenario, 0.9)
