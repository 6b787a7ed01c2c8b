"""Properties over generated scenarios must decide most of them: a check that decides nothing finds nothing either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.tally import TallyRow, current_counts

LEAST_SHARE = 0.5
"""Of a property's scenarios, those that must be clearly EQUIVALENT: neither KNOWN, UNSUPPORTED or INCONCLUSIVE, nor only up to a
step. Measured in sim with the profile ci: 100 % for FSDP1, FSDP2 and replicate, 99 % for tensor parallelism, 94 % for DDP, 93 %
for pipelines, 90 to 95 % for compositions (of 20 each), and 22 of 27 for SPMD: one run of ten in 170 is below by bad luck."""
LEAST_SHARES = {"ddp x tensor_parallel": 0.2}
"""Where it is less: 10 of 20 were equivalent with the profile ci, and 20 of 30 others; the rest showed four known issues."""
FEWEST = 10
"""Scenarios below which a share says too little: over gloo, compositions have two or so."""
MARK = "mostly_equivalent"


def pytest_configure(config: pytest.Config) -> None:
    """Know the mark of such properties."""
    config.addinivalue_line("markers", f"{MARK}: fails where too few of its checks are clearly equivalent")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Within the wrapper of the plugin, which takes the counts of each test: count what a property has decided."""
    result = yield
    if item.get_closest_marker(MARK) is not None:
        problem = undecided(current_counts(), least_share(item))
        if problem:
            pytest.fail(problem, pytrace=False)
    return result


def least_share(item: pytest.Item) -> float:
    """What is asked of the layout that a test is parametrized by."""
    callspec = getattr(item, "callspec", None)
    return LEAST_SHARE if callspec is None else LEAST_SHARES.get(callspec.params.get("layout"), LEAST_SHARE)


def undecided(checks: Counter[TallyRow], least: float) -> str:
    """What is wrong with the outcomes of a property; empty if most are clear, or there are too few to tell."""
    outcomes: Counter[str] = Counter()
    for (_layout, _world, outcome), number in checks.items():
        outcomes[outcome] += number
    total, clear = outcomes.total(), outcomes.pop(Outcome.EQUIVALENT.value, 0)
    if total < FEWEST or clear >= least * total:
        return ""
    others = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    return f"{clear} of {total} scenarios are clearly equivalent ({clear / total:.0%}, expected {least:.0%}); others: {others}"
