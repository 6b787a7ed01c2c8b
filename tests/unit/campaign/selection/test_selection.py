"""What a worker has time for."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.campaign.selection.novelty import COMPILED_SHARE, TRACED_SHARE, Selection, TimeBudget
from equivcheck.layouts.base.execution.compile_time import START_SECONDS, expected_compile_seconds, expected_trace_seconds
from equivcheck.scenario import SPMD, Axis, Execution, Layout, Mesh, StepLR
from unit.campaign import fakes

EAGER = fakes.scenario()
COMPILED = fakes.compiled()


def traced_on(num_ranks: int) -> Layout:
    """SPMD on so many ranks whose steps are traced."""
    mesh = Mesh(axes=(Axis(name="dp", size=num_ranks),))
    return Layout(mesh=mesh, parallelisms=(SPMD(),), execution=Execution(whole_step=True))


TRACED = replace(EAGER, layout=traced_on(2))
EXPECTED = expected_compile_seconds(COMPILED)


def test_compiled_scenarios_have_a_share_of_the_time() -> None:
    """When it is used up none is checked any more, and others go on."""
    budget = TimeBudget(2 * EXPECTED, expected_compile_seconds)
    for _ in range(2):
        assert budget.allows(COMPILED)
        budget.spend(COMPILED)

    assert not budget.allows(COMPILED)
    assert budget.allows(EAGER)


def test_what_is_not_compiled_uses_nothing_up() -> None:
    """The share is for compiling."""
    budget = TimeBudget(EXPECTED, expected_compile_seconds)
    for _ in range(1000):
        budget.spend(EAGER)

    assert budget.allows(COMPILED)


def test_a_short_run_begins_nothing_that_takes_longer() -> None:
    """A scenario whose compiling, or tracing, would take most of a worker's time is left to longer runs."""
    tracing = expected_trace_seconds(TRACED) / TRACED_SHARE
    for scenario, seconds in ((COMPILED, (START_SECONDS + EXPECTED) / COMPILED_SHARE), (TRACED, tracing)):
        assert not Selection(0.9 * seconds).wants(scenario)
        assert Selection(1.1 * seconds).wants(scenario)
    assert Selection(0.0).wants(EAGER)


def test_tracing_takes_longer_the_more_is_traced() -> None:
    """Every rank traces every layer for every microbatch, and each step anew whose learning rate is new; nothing without."""
    training = TRACED.training
    least = expected_trace_seconds(TRACED)
    scheduled = replace(TRACED, training=replace(training, steps=4, schedule=StepLR()))
    assert expected_trace_seconds(EAGER) == 0.0 < least
    assert expected_trace_seconds(replace(TRACED, training=replace(training, steps=4))) == 2 * least
    assert expected_trace_seconds(scheduled) == 4 * least
    assert expected_trace_seconds(replace(TRACED, layout=traced_on(4))) == 2 * least
