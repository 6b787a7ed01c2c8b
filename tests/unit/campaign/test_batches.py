"""Scenarios from Hypothesis."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from equivcheck.campaign.batches import EndBatch, FaultShown, batch_seed, run_batch
from equivcheck.scenario import Scenario
from equivcheck.strategies import scenarios
from unit.campaign import fakes

SCENARIOS = st.builds(fakes.scenario, width=st.integers(1, 32), steps=st.integers(1, 5))


def drawn(seed: int) -> list[Scenario]:
    """The first scenarios of a batch."""
    taken: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        taken.append(scenario)
        if len(taken) == 50:
            raise EndBatch

    run_batch(SCENARIOS, seed, take)
    return taken


def test_the_seed_decides_what_is_drawn() -> None:
    """Equal seeds draw equal scenarios in the same order, and different seeds different ones."""
    assert drawn(batch_seed(1, 0, 0, 0)) == drawn(batch_seed(1, 0, 0, 0))
    assert drawn(batch_seed(1, 0, 0, 0)) != drawn(batch_seed(1, 1, 0, 0))


def test_enough_ends_a_batch_at_once() -> None:
    """After `EndBatch` no other scenario is taken."""
    assert len(drawn(3)) == 50


def test_what_shows_is_shrunk() -> None:
    """A scenario that raises `FaultShown` is shrunk to the smallest that raises it."""
    shown: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        if scenario.training.model.widths[1] >= 7:
            shown.append(scenario)
            raise FaultShown

    run_batch(SCENARIOS, 5, take)
    assert shown[-1] == fakes.scenario(width=7)


def test_a_fault_that_does_not_show_again_ends_the_batch_quietly() -> None:
    """What shows once and never again is no error."""
    taken: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        taken.append(scenario)
        if len(taken) == 20:
            raise FaultShown

    run_batch(SCENARIOS, 5, take)
    assert len(taken) >= 20


def test_scenarios_of_a_batch_are_drawn_afresh() -> None:
    """They are no variations of a few: neighbours seldom have their layout in common, which a variation mostly keeps."""
    taken: list[Scenario] = []

    def take(scenario: Scenario) -> None:
        taken.append(scenario)
        if len(taken) == 60:
            raise EndBatch

    run_batch(scenarios(), 3, take)
    same = sum(before.layout.name == after.layout.name for before, after in pairwise(taken))
    assert same < 20
