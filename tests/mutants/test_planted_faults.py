"""Planted faults: each is caught, and shrinks to a scenario that a person can hold in their head."""

import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, find, settings

from equivcheck import Outcome, Scenario, check
from equivcheck.strategies import scenarios
from mutants.planted import FAULTS, Fault

SEARCH = settings(max_examples=2000, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _tolerate_torch_warnings() -> Iterator[None]:
    """Half-finished runs make torch warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_and_shrinks(fault: Fault) -> None:
    """At most two ranks, two layers and three steps are left, and the same scenario without the fault is equivalent."""

    def caught(scenario: Scenario) -> bool:
        return check(scenario, alter=fault.plant).outcome.is_finding

    smallest = find(scenarios(layouts=(fault.layout,)), caught, settings=SEARCH)

    assert smallest.layout.mesh.num_ranks <= 2
    assert len(smallest.training.model.layers) <= 2
    assert smallest.training.steps <= 3
    assert check(smallest).outcome is Outcome.EQUIVALENT


def test_a_rank_that_skips_a_collective_is_a_hang_with_every_ranks_place() -> None:
    """A deadlock or mismatch is known at once, and each rank says where it was."""
    (fault,) = [fault for fault in FAULTS if "skips" in fault.name]
    smallest = find(
        scenarios(layouts=(fault.layout,)),
        lambda scenario: check(scenario, alter=fault.plant).outcome is Outcome.HUNG,
        settings=SEARCH,
    )

    verdict = check(smallest, alter=fault.plant)

    assert verdict.failure is not None
    assert len(verdict.failure.reports) == smallest.layout.mesh.num_ranks
    assert any("all_reduce" in report.pending for report in verdict.failure.reports)
    assert verdict.seconds < timedelta(seconds=5).total_seconds()
