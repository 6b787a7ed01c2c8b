"""The diagnosis of each mutant where the smallest scenario shows it, from what the ranks left alone."""

from __future__ import annotations

import pytest

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutants
from mutants import minimums, minimums_of_layers

pytestmark = pytest.mark.filterwarnings("ignore")

LEAST_RATE = 0.95


def test_nearly_all_mutants_are_diagnosed_rightly() -> None:
    """A diagnosis is right if it is one of those that the mutant counts as right; those that are not are listed."""
    scenarios = minimums.MINIMUMS | minimums_of_layers.MINIMUMS
    wrong = []
    for name, mutant in mutants().items():
        found = explained(check(scenarios[name], alter=mutant.plant), alter=mutant.plant).diagnosis
        if found is None or found.cause not in mutant.causes:
            wrong.append((name, mutant.causes, found))

    assert len(wrong) <= (1 - LEAST_RATE) * len(mutants()), wrong
