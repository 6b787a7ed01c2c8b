"""The property: under every layout, a parallel training computes what one device computes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings

import equivcheck
from equivcheck import Scenario, Verdict
from equivcheck.composition.registry import layout_kinds, layout_names
from equivcheck.scenario.file_format.codec import from_json
from equivcheck.strategies import scenarios

COMPOSITIONS = tuple(name for name in layout_names() if name not in layout_kinds())
SIM_EXAMPLES = max(100, settings().max_examples)
"""Scenarios a layout in sim; a profile may ask for more."""
GLOO_EXAMPLES = max(10, settings().max_examples // 10)
"""Scenarios a layout over gloo, where one costs many times as much."""

SHARE_OF_COMPOSITIONS = 0.2
"""How many times fewer scenarios a composition has: what its parallelisms do alone is tried alone, and its ranks are more."""

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

pytestmark = pytest.mark.mostly_equivalent

UNDECIDED = tuple(from_json(path.read_text("utf-8")) for path in Path(__file__).with_name("undecided").glob("*.json"))
"""Findings that nobody has decided yet, each a difference of a few tolerances that rounding may explain, or may not.

``adamax_over_gloo``: float32, 4 ranks; Adamax's first update of one weight is off by 2.07 x tolerance over gloo.
"""


def check(scenario: Scenario, **options: Any) -> Verdict:
    """As `equivcheck.check`, for anything but what is undecided."""
    return reject() if scenario in UNDECIDED else equivcheck.check(scenario, **options)


def _examples(layout: str, number: int) -> int:
    return int(number * SHARE_OF_COMPOSITIONS) if layout in COMPOSITIONS else number


@pytest.mark.parametrize("layout", layout_names())
def test_parallel_equals_single_device_in_sim(layout: str) -> None:
    """Ranks as threads leave the parameters, gradients, losses, norms and state of the single-device run."""

    @settings(UNHURRIED, max_examples=_examples(layout, SIM_EXAMPLES))
    @given(scenarios(layouts=(layout,)))
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
