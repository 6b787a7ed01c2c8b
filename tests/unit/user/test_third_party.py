"""A third party's layout and mutant are found through entry points and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given, settings

from equivcheck import Outcome, Scenario, Verdict, check
from equivcheck.layouts.composition import registry as layouts
from equivcheck.mutants import registry as mutants
from equivcheck.strategies import scenarios
from equivcheck.strategies.layout import _names
from equivcheck.strategies.parallelism import parallelisms_of

POINTS = {
    "equivcheck.layouts": EntryPoint("by_hand", "unit.user.third_party:ByHandKind", "equivcheck.layouts"),
    "equivcheck.mutants": EntryPoint("doubled", "unit.user.third_party:DOUBLED", "equivcheck.mutants"),
}
CACHES = (layouts.layout_kinds, layouts.layout_names, mutants.mutants, parallelisms_of, _names)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """Pretend that a package with these entry points is installed."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (layouts, mutants):
            patch.setattr(registry, "entry_points", lambda group: (POINTS[group],))
        _forget()
        yield
    _forget()


def _forget() -> None:
    for cache in CACHES:
        cache.cache_clear()


def _is_of_another(verdict: Verdict) -> bool:
    """Whether a known issue showed before a checkpoint, under one of torch's layouts."""
    return verdict.outcome is Outcome.KNOWN and "before the checkpoint, under " in verdict.reason


@settings(max_examples=5)
@given(scenarios(layouts=("by_hand",), max_ranks=2))
def test_a_layout_is_generated_and_checked(scenario: Scenario) -> None:
    """Options are drawn from its fields, and it is equivalent."""
    assert scenario.layout.name == "by_hand"
    verdict = check(scenario)
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.INCONCLUSIVE) or _is_of_another(verdict), verdict.reason


def test_a_mutant_is_planted_and_caught() -> None:
    """The mutant is found by name and caught if the scenario is equivalent without it."""
    mutant, caught = mutants.mutant("doubled_by_hand"), Counter[bool]()
    assert mutant in mutants.mutants_of(("by_hand",))

    @settings(max_examples=10)
    @given(scenarios(layouts=("by_hand",), max_ranks=2))
    def is_caught(scenario: Scenario) -> None:
        is_clear = check(scenario).is_clear
        caught[is_clear] += 1
        if is_clear:
            verdict = check(scenario, alter=mutant.plant)
            assert verdict.outcome.is_finding, verdict.reason

    is_caught()
    assert caught[True] > caught[False], "most scenarios say something"
