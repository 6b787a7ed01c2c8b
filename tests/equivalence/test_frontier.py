"""The property beyond what torch supports: a run is right or raises on every rank; it is never silently wrong and never hangs."""

import pytest
from hypothesis import settings
from hypothesis.strategies import SearchStrategy

from equivcheck import Outcome, Scenario, check
from equivcheck.checking.beyond import raised_on_every_rank as raised_everywhere
from equivcheck.layouts.composition.limits import limit_reason
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.strategies import frontier, scenarios
from support.fresh import drawn_afresh

LAYOUTS = tuple(layout_kinds())
EXAMPLES = max(5, settings().max_examples // 20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beyond_support_nothing_is_silently_wrong(layout: str) -> None:
    """Whatever torch does not support raises on every rank, or works, or is on file."""

    @drawn_afresh(frontier(layouts=(layout,), max_ranks=4), examples=EXAMPLES)
    def right_or_refused(scenario: Scenario) -> None:
        verdict = check(scenario, beyond=True)
        if not (verdict.outcome is Outcome.CRASHED and raised_everywhere(verdict)):
            verdict.assert_no_finding()

    right_or_refused()


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "tensor_parallel", "spmd"])
def test_the_frontier_is_beyond_what_is_supported(layout: str) -> None:
    """Some scenarios of the frontier are refused by an ordinary check, and none of the ordinary ones is."""
    refused = [0, 0]

    def count(strategy: SearchStrategy[Scenario], place: int) -> None:
        @drawn_afresh(strategy, examples=12 * EXAMPLES)
        def look(scenario: Scenario) -> None:
            refused[place] += limit_reason(scenario.training, scenario.layout) is not None
            assert limit_reason(scenario.training, scenario.layout, beyond=True) is None

        look()

    count(frontier(layouts=(layout,)), 0)
    count(scenarios(layouts=(layout,)), 1)
    assert refused[0] > 0
    assert refused[1] == 0
