"""The property: under every layout, a parallel training computes what one device computes."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from equivcheck import Scenario, check
from equivcheck.layouts.registry import layout_kinds
from equivcheck.strategies import scenarios

LAYOUTS = tuple(layout_kinds())
SIM_EXAMPLES = max(100, settings().max_examples)
"""Scenarios a layout in sim; a profile may ask for more."""
GLOO_EXAMPLES = max(25, settings().max_examples // 4)
"""Scenarios a layout over gloo, where one costs many times as much."""

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_equals_single_device_in_sim(layout: str) -> None:
    """Ranks as threads leave the parameters, gradients, losses, norms and state of the single-device run."""

    @settings(UNHURRIED, max_examples=SIM_EXAMPLES)
    @given(scenarios(layouts=(layout,)))
    def equivalent(scenario: Scenario) -> None:
        check(scenario).assert_equivalent()

    equivalent()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_equals_single_device_over_gloo(layout: str) -> None:
    """Real processes leave the same."""

    @settings(UNHURRIED, max_examples=GLOO_EXAMPLES, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(scenarios(layouts=(layout,), max_ranks=4))
    def equivalent(scenario: Scenario) -> None:
        check(scenario, world="gloo").assert_equivalent()

    equivalent()
