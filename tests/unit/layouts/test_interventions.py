"""The table of changes to the ranks' code is complete."""

import re
from functools import reduce
from importlib import import_module
from importlib.resources import files

import pytest

from equivcheck.layouts.base.interventions import BY_DEFINITION, INTERVENTIONS, Intervention
from equivcheck.oracle.known_issues.known import read_issues

ON_FILE = {issue.id for issue in read_issues(files("equivcheck.oracle.known_issues").joinpath("known.toml").read_text("utf-8"))}


@pytest.mark.parametrize("one", INTERVENTIONS, ids=lambda one: one.place)
def test_an_intervention_exists_and_says_what_it_avoids(one: Intervention) -> None:
    """Its function exists, and its torch problem is a link, a known issue, not reported, or none."""
    module, _, name = one.place.partition(":")
    assert reduce(getattr, name.split("."), import_module(module)) is not None
    told = one.upstream.startswith((BY_DEFINITION, "not reported", "https://github.com/pytorch/pytorch/"))
    assert told or set(re.split(", ", one.upstream)) <= ON_FILE


def test_no_place_is_named_twice() -> None:
    """Each place has one entry."""
    assert len({one.place for one in INTERVENTIONS}) == len(INTERVENTIONS)
