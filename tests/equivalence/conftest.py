"""Properties over generated scenarios must decide most of them: a check that decides nothing finds nothing either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

from equivcheck.tally import Row, counted
from equivcheck.verdict.verdict import Outcome

LEAST_SHARE = 0.6
"""Of a property's scenarios, those that must be clearly EQUIVALENT: neither KNOWN, UNSUPPORTED or INCONCLUSIVE, nor only up to a
step. Measured with the profile ci (100 scenarios a layout, 20 a composition): MEASURED."""
FEWEST = 10
"""Scenarios below which a share says too little: over gloo, compositions have two or so."""
MARK = "mostly_equivalent"


def pytest_configure(config: pytest.Config) -> None:
    """Know the mark of such properties."""
    config.addinivalue_line("markers", f"{MARK}: fails where less than {LEAST_SHARE:.0%} of its checks are clearly equivalent")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Within the wrapper of the plugin, which takes the counts of each test: count what a property has decided."""
    result = yield
    if item.get_closest_marker(MARK) is not None:
        problem = undecided(counted())
        if problem:
            pytest.fail(problem, pytrace=False)
    return result


def undecided(checks: Counter[Row]) -> str:
    """What is wrong with the outcomes of a property; empty if most are clear, or there are too few to tell."""
    outcomes: Counter[str] = Counter()
    for (_layout, _world, outcome), number in checks.items():
        outcomes[outcome] += number
    total, clear = outcomes.total(), outcomes.pop(Outcome.EQUIVALENT.value, 0)
    if total < FEWEST or clear >= LEAST_SHARE * total:
        return ""
    others = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    return (
        f"{clear} of {total} scenarios are clearly equivalent ({clear / total:.0%}, expected {LEAST_SHARE:.0%}); others: {others}"
    )
