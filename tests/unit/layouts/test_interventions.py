"""The table of changes to the ranks' code names functions and torch problems that exist."""

import tomllib
from functools import reduce
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from equivcheck.oracle.known_issues.known import read_issues

INTERVENTIONS = tomllib.loads(Path(__file__).parents[3].joinpath("docs/generator/interventions.toml").read_text("utf-8"))[
    "intervention"
]
ON_FILE = {issue.id for issue in read_issues(files("equivcheck.oracle.known_issues").joinpath("known.toml").read_text("utf-8"))}


@pytest.mark.parametrize("one", INTERVENTIONS, ids=lambda one: one["place"])
def test_an_intervention_exists_and_says_what_it_avoids(one: dict[str, str]) -> None:
    """Its function exists, and its torch problem is a link, a known issue, not reported, or none."""
    module, _, name = one["place"].partition(":")
    assert reduce(getattr, name.split("."), import_module(f"equivcheck.{module}")) is not None
    assert {"place", "what", "why"} <= one.keys() <= {"place", "what", "why", "upstream"}
    assert all(one.values())
    upstream = one.get("upstream", "not reported")
    assert upstream.startswith(("not reported", "https://github.com/pytorch/pytorch/")) or set(upstream.split(", ")) <= ON_FILE


def test_no_place_is_named_twice() -> None:
    """Each place has one entry."""
    assert len({one["place"] for one in INTERVENTIONS}) == len(INTERVENTIONS)
