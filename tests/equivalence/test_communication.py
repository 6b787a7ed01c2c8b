"""The property: what ranks communicate follows from the scenario; `check` compares, here it is that something is predicted."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from equivcheck import Scenario
from equivcheck.layouts.base.expected_calls.model import NO_COMMUNICATION_MODEL
from equivcheck.layouts.composition.expected_calls import UNPREDICTED_EXECUTION, predict_calls
from equivcheck.layouts.composition.registry import kinds_of, layout_kinds, layout_names
from equivcheck.strategies import scenarios

DECLARED = tuple(
    unmodelled.reason
    for declared in (UNPREDICTED_EXECUTION, *(kind.communication.unmodelled for kind in layout_kinds().values()))
    for unmodelled in declared
)
"""Why some scenarios are not modelled, as their layouts declare it."""
MODELLED_SHARE = 0.95
"""Of all other scenarios of a layout, at least."""
ANY_SHARE = 0.1
"""Of all, whatever their layout declares, at least."""
SAYING = tuple(
    name for name in layout_names() if all(kind.communication is not NO_COMMUNICATION_MODEL for kind in kinds_of(name))
)
"""Layouts of which every parallelism says what it communicates."""


@pytest.mark.parametrize("layout", SAYING)
def test_communication_is_predicted(layout: str) -> None:
    """Of nearly all scenarios that are drawn, calls and bytes of every step are predicted; of others, there is a reason."""
    reasons: list[str] = []

    def expected(scenario: Scenario) -> None:
        reasons.append(predict_calls(scenario.training, scenario.layout).reason)

    for number in range(4):  # one run of Hypothesis alone may stay with one kind of scenario for long
        run = settings(
            max_examples=20, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
        )
        seed(number)(run(given(scenarios(layouts=(layout,)))(expected)))()
    unmodelled = [reason for reason in reasons if reason and reason not in DECLARED]
    assert len(unmodelled) <= (1 - MODELLED_SHARE) * len(reasons), set(unmodelled)
    assert reasons.count("") >= ANY_SHARE * len(reasons)


def test_only_pipelines_leave_something_out() -> None:
    """Of all layouts that ship with the package, each says what it communicates, but for what stages send and receive."""
    assert set(SAYING) == set(layout_names())
    partly = {name for name, kind in layout_kinds().items() if not all(each.is_total for each in kind.communication.unmodelled)}
    assert partly == {"pipeline"}
