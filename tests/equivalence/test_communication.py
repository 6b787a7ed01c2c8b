"""The property: what ranks tell each other follows from the scenario; `check` compares, here it is that something is foreseen."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from equivcheck import Scenario
from equivcheck.composition.expected_calls import EXECUTION_GAPS, predicted
from equivcheck.composition.registry import kinds_of, layout_kinds, layout_names
from equivcheck.layouts.expected_calls.model import NO_FORESIGHT, UNSAID
from equivcheck.strategies import scenarios

DECLARED = tuple(
    gap.reason
    for gap in (*EXECUTION_GAPS, *(gap for kind in layout_kinds().values() for gap in kind.foresight.gaps))
    if gap is not UNSAID
)
"""Why some scenarios are not foreseen, as their layouts declare it."""
FORESEEN_SHARE = 0.95
"""Of all other scenarios of a layout, at least."""
ANY_SHARE = 0.1
"""Of all, whatever their layout declares, at least."""
SAYING = tuple(name for name in layout_names() if all(kind.foresight is not NO_FORESIGHT for kind in kinds_of(name)))
"""Layouts of which every parallelism says what it communicates."""


@pytest.mark.parametrize("layout", SAYING)
def test_communication_is_foreseen(layout: str) -> None:
    """Of nearly all scenarios that are drawn, calls and bytes of every step are foreseen; of others, there is a reason."""
    reasons: list[str] = []

    @settings(
        max_examples=100,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(layouts=(layout,)))
    def foreseen(scenario: Scenario) -> None:
        reasons.append(predicted(scenario.training, scenario.layout).reason)

    foreseen()
    unforeseen = [reason for reason in reasons if reason and reason not in DECLARED]
    assert len(unforeseen) <= (1 - FORESEEN_SHARE) * len(reasons), set(unforeseen)
    assert reasons.count("") >= ANY_SHARE * len(reasons)


def test_only_pipelines_say_nothing() -> None:
    """Of all layouts that ship with the package, no other leaves out what it communicates."""
    assert set(layout_names()) - set(SAYING) == {"pipeline"}
