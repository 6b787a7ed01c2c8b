"""Planted faults are caught and shrink to small scenarios."""

import pytest
from hypothesis import HealthCheck, find, settings

from equivcheck import Outcome, Scenario, check
from equivcheck.mutants.registry import mutant
from equivcheck.strategies import scenarios
from equivcheck.worlds.failure import FailureKind

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of interrupted runs


PLANTED = (
    ("gradients_summed", "ddp"),
    pytest.param("parameter_left_out", "ddp", marks=pytest.mark.slow),
    pytest.param("averaged_twice", "fsdp2", marks=pytest.mark.slow),
    pytest.param("row_bias_on_every_rank", "tensor_parallel", marks=pytest.mark.slow),
    pytest.param("full_batch_on_every_rank", "spmd", marks=pytest.mark.slow),
    pytest.param("state_lost", "fsdp2", marks=pytest.mark.slow),
    pytest.param("rank_skips_reduction", "ddp", marks=pytest.mark.slow),
)
"""Mutants, each with a layout to plant it in."""
SEARCH = settings(max_examples=2000, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def _shrunk(name: str, layout: str, outcomes: tuple[Outcome, ...]) -> Scenario:
    """The smallest scenario whose verdict with the mutant is one of `outcomes`."""
    found = mutant(name)

    def caught(scenario: Scenario) -> bool:
        return found.applies(scenario) and check(scenario, alter=found.plant).outcome in outcomes

    return find(scenarios(layouts=(layout,)), caught, settings=SEARCH)


@pytest.mark.parametrize(("name", "layout"), PLANTED)
def test_a_planted_fault_is_caught_and_shrinks(name: str, layout: str) -> None:
    """At most two ranks, two layers and three steps are left, and the scenario is equivalent without the fault."""
    smallest = _shrunk(name, layout, tuple(outcome for outcome in Outcome if outcome.is_finding))

    assert smallest.layout.mesh.num_ranks <= 2
    assert len(smallest.training.model.layers) <= 2
    assert smallest.training.steps <= 3
    assert check(smallest).outcome is Outcome.EQUIVALENT


def test_a_rank_that_skips_a_collective_is_a_hang_with_every_ranks_place() -> None:
    """A deadlock or mismatch is recognised without a timeout, and each rank reports its position."""
    smallest = _shrunk("rank_skips_reduction", "ddp", (Outcome.HUNG,))

    verdict = check(smallest, alter=mutant("rank_skips_reduction").plant)

    assert verdict.failure is not None
    assert len(verdict.failure.reports) == smallest.layout.mesh.num_ranks
    assert any("all_reduce" in report.pending for report in verdict.failure.reports)
    assert verdict.failure.kind in (FailureKind.DEADLOCK, FailureKind.MISMATCH)
