"""Which of the scenarios that are drawn are checked."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from statistics import mean

from equivcheck.campaign.batches import EndBatch, run_batch
from equivcheck.campaign.coverage.reach import Reach
from equivcheck.campaign.selection.novelty import CHECKS_FOR_ONE_MORE, FIRST_WINDOW, WINDOW, Novelty, expected_cost
from equivcheck.scenario import Scenario
from equivcheck.strategies import scenarios
from unit.campaign.coverage.test_features import SCENARIO

BUDGET = 700.0
"""Cost of compared scenarios. A larger one comes near all pairs in 400 scenarios, whatever is chosen."""


def drawn(count: int) -> list[Scenario]:
    """As many as a campaign would draw."""
    found: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        found.append(scenario)
        if len(found) == count:
            raise EndBatch

    run_batch(scenarios(), 1, take)
    return found


def reached(some: list[Scenario]) -> int:
    """Pairs of features that came together in them."""
    reach = Reach()
    for scenario in some:
        reach.add(scenario)
    return reach.drawn_pairs.count


def of_cost(some: list[Scenario], cost: float) -> list[Scenario]:
    """As many of the first of them as one can check for that."""
    costs = accumulate(map(expected_cost, some))
    return [scenario for scenario, so_far in zip(some, costs, strict=True) if so_far <= cost]


def test_what_is_chosen_reaches_further() -> None:
    """At the same cost, chosen scenarios reach more pairs than others, on average over orders: the first drawn are cheaper."""
    every, novelty = drawn(400), Novelty()
    chosen = [scenario for scenario in every if novelty.wants(scenario)]
    assert 400 / WINDOW / 2 < len(chosen) < 200
    assert sum(map(expected_cost, chosen)) >= BUDGET
    orders = [Random(seed).sample(every, len(every)) for seed in range(5)]
    assert reached(of_cost(chosen, BUDGET)) > 1.25 * mean(reached(of_cost(order, BUDGET)) for order in orders)


def for_its_cost(scenario: Scenario, *before: Scenario) -> float:
    """New pairs of a scenario, after others, for what it costs."""
    reach = Reach()
    for each in before:
        reach.add(each)
    return reach.gain(scenario) / expected_cost(scenario)


def test_more_features_are_no_reason_to_cost_more() -> None:
    """What costs more is not wanted for a larger number of new pairs, even for its cost: their part counts."""
    some = [scenario for scenario in drawn(40) if not scenario.layout.execution.whole_step]
    costlier = [(one, other) for one in some for other in some if expected_cost(one) < expected_cost(other)]
    richer = [(one, other) for one, other in costlier if for_its_cost(one) < for_its_cost(other, one)]
    assert richer
    for one, other in richer:
        novelty = Novelty()
        assert [novelty.wants(one), novelty.wants(other)] == [True, False]


def test_what_brings_nothing_new_is_not_left_out() -> None:
    """Where no scenario brings new pairs any more, every one is wanted."""
    novelty = Novelty()
    assert novelty.wants(SCENARIO)
    later = [novelty.wants(SCENARIO) for _ in range(2 * FIRST_WINDOW)]
    assert not any(later[: FIRST_WINDOW - 1])
    assert all(later[FIRST_WINDOW - 1 :])


def test_the_longer_it_runs_the_more_is_drawn_for_each_that_is_checked() -> None:
    """At first nearly everything is new; in the end what is wanted brings more than all that was drawn in a whole window."""
    novelty = Novelty()
    nothing_new = [SCENARIO] * (WINDOW * CHECKS_FOR_ONE_MORE + 1)
    assert sum(map(novelty.wants, nothing_new)) > (WINDOW - FIRST_WINDOW) * CHECKS_FOR_ONE_MORE
    other = next(scenario for scenario in drawn(20) if novelty.wants(scenario))
    assert novelty.wants(other) is False
    later = [novelty.wants(SCENARIO) for _ in range(WINDOW)]
    assert later == [False] * (WINDOW - 2) + [True] * 2


def test_what_may_end_as_known_competes_only_with_its_kind() -> None:
    """What brings more, and cannot, does not outbid it: it has its own share of the checks."""
    novelty = Novelty()
    assert novelty.wants(SCENARIO)
    assert not novelty.wants(SCENARIO)
    assert novelty.wants(SCENARIO, may_be_known=True)
