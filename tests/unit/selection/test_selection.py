"""What a worker has time for."""

from __future__ import annotations

from equivcheck.layouts.execution.compile_time import expected_compile_seconds
from equivcheck.selection.novelty import COMPILED_SHARE, CompileBudget
from unit.campaign import fakes

EAGER = fakes.scenario()
COMPILED = fakes.compiled()
EXPECTED = expected_compile_seconds(COMPILED)


def test_compiled_scenarios_have_a_share_of_the_time() -> None:
    """When it is used up none is checked any more, and others go on."""
    budget = CompileBudget(2 * EXPECTED / COMPILED_SHARE)
    for _ in range(2):
        assert budget.allows(COMPILED)
        budget.spend(COMPILED)

    assert not budget.allows(COMPILED)
    assert budget.allows(EAGER)


def test_what_is_not_compiled_uses_nothing_up() -> None:
    """The share is for compiling."""
    budget = CompileBudget(EXPECTED / COMPILED_SHARE)
    for _ in range(1000):
        budget.spend(EAGER)

    assert budget.allows(COMPILED)


def test_a_short_run_begins_nothing_that_takes_longer() -> None:
    """A scenario whose compiling would take most of a worker's time is left to longer runs."""
    assert not CompileBudget(EXPECTED / COMPILED_SHARE * 0.9).allows(COMPILED)
