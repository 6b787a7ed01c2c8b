"""The property: under every layout, a parallel training computes what one device computes."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition.registry import layout_kinds, layout_names
from equivcheck.scenario.file_format.codec import from_json
from equivcheck.strategies import scenarios
from support.fresh import drawn_afresh

COMPOSITIONS = tuple(name for name in layout_names() if name not in layout_kinds())
SIM_EXAMPLES = max(6, settings().max_examples // 16)
"""Scenarios a layout in sim, drawn afresh; a profile may ask for more."""
GLOO_EXAMPLES = max(3, settings().max_examples // 33)
"""Scenarios a layout over gloo, where one costs many times as much."""

SHARE_OF_COMPOSITIONS = 1 / 3
"""How many times fewer scenarios a composition has: what its parallelisms do alone is tried alone, and its ranks are more."""

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

pytestmark = pytest.mark.mostly_equivalent

DOWNWARDS = from_json(Path(__file__).with_name("summed_downwards.json").read_text("utf-8"))
"""Of gradients reduced in bfloat16, gloo adds up each shard in an order of its own, and Adamax divides one element by itself."""


def _examples(layout: str, number: int) -> int:
    return round(number * SHARE_OF_COMPOSITIONS) if layout in COMPOSITIONS else number


@pytest.mark.parametrize("layout", layout_names())
def test_parallel_equals_single_device_in_sim(layout: str) -> None:
    """Ranks as threads leave the parameters, gradients, losses, norms and state of the single-device run."""

    @drawn_afresh(scenarios(layouts=(layout,)), examples=_examples(layout, SIM_EXAMPLES))
    def equivalent(scenario: Scenario) -> None:
        check(scenario).assert_no_finding()

    equivalent()


@pytest.mark.parametrize("layout", layout_names())
def test_parallel_equals_single_device_over_gloo(layout: str) -> None:
    """Real processes leave the same."""

    @settings(UNHURRIED, max_examples=_examples(layout, GLOO_EXAMPLES), phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(scenarios(layouts=(layout,), max_ranks=4))
    def equivalent(scenario: Scenario) -> None:
        check(scenario, world="gloo").assert_no_finding()

    equivalent()


def test_each_order_of_a_ring_counts_as_noise() -> None:
    """Gradients that gloo adds up downwards, as one device does in that order to the bit, are no finding."""
    assert check(DOWNWARDS, world="gloo").outcome is Outcome.EQUIVALENT
