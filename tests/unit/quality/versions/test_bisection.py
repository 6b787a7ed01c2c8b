"""In which versions something begins and ends to show."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from equivcheck.campaign.findings.versions import Method, ShownIn, VersionAnswer
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.quality.versions.measuring import bisect_versions

VERSIONS = tuple(map(Version, ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")))
ANSWERS = {"+": Shows.SHOWS, "-": Shows.DOES_NOT, "?": Shows.CANNOT_RUN}


def shown_in(answers: str, *first: str, asked: list[str] | None = None) -> ShownIn:
    """What bisection finds where the versions have these answers, one character each."""
    there = dict(zip(VERSIONS, answers, strict=True))

    def measure(version: Version) -> Showing:
        if asked is not None:
            asked.append(str(version))
        return Showing(shows=ANSWERS[there[version]])

    measured = bisect_versions(VERSIONS, measure, map(Version, first))
    return ShownIn(by=Method.SCRIPT, versions=tuple(map(str, VERSIONS)), measured=measured)


@pytest.mark.parametrize(
    ("answers", "words", "ranges"),
    [
        ("--+++++", "begins in 2.11.0, still shows in 2.15.0", (">=2.11",)),
        ("+++----", "shows in 2.9.1, the oldest measured, fixed in 2.12.1", (">=2.9,<2.12",)),
        ("+++++++", "shows in 2.9.1, the oldest measured, still shows in 2.15.0", (">=2.9",)),
        ("---+---", "begins in 2.12.1, fixed in 2.13.0", (">=2.12,<2.13",)),
        ("??+++++", "begins in 2.11.0 or earlier (2.10.0 cannot run it), still shows in 2.15.0", (">=2.11",)),
        ("-++++??", "begins in 2.10.0, last shows in 2.13.0 (2.14.1 cannot run it)", (">=2.10,<2.14",)),
        ("+-----+", "shows in 2.9.1, the oldest measured, fixed in 2.10.0; begins in 2.15.0, still shows in 2.15.0", None),
        ("-------", "shows in no measured version", ()),
        ("???????", "cannot run in any measured version", ()),
    ],
)
def test_a_change_lands_between_the_right_versions(answers: str, words: str, ranges: tuple[str, ...] | None) -> None:
    """What begins and what ends is told by its version, and what cannot be told is said to be so."""
    found = shown_in(answers, "2.12.1")
    assert str(found) == words
    assert ranges is None or found.specifiers == ranges


def test_few_versions_are_measured() -> None:
    """Both ends, where it was found, and half of what is left each time; none of them twice."""
    asked: list[str] = []
    found = shown_in("--+++++", "2.13.0", asked=asked)
    assert asked == ["2.9.1", "2.15.0", "2.13.0", "2.11.0", "2.10.0"]
    assert found.skipped_versions == ("2.12.1", "2.14.1")


def test_what_shows_nowhere_at_first_is_looked_for_everywhere() -> None:
    """Ends that agree prove nothing about what lies between them, unless it shows in both."""
    assert str(shown_in("----+--")) == "begins in 2.13.0, fixed in 2.14.1"
    assert shown_in("-------").skipped_versions == ()


@given(st.text("+-?", min_size=len(VERSIONS), max_size=len(VERSIONS)))
def test_neighbours_of_every_change_are_measured(answers: str) -> None:
    """Between two measured versions whose answers differ there is none that was not measured."""
    found = shown_in(answers)
    places = [VERSIONS.index(Version(one.torch)) for one in found.measured]
    for (before, after), (first, second) in zip(pairwise(found.measured), pairwise(places), strict=True):
        assert before.showing.shows is after.showing.shows or second == first + 1
    assert found.shows == ("+" in answers)


def test_a_patch_that_differs_from_an_older_one_is_the_bound() -> None:
    """A range is by minor versions, unless it begins within one."""
    answers = {"2.9.0": Shows.DOES_NOT, "2.9.1": Shows.SHOWS, "2.10.0": Shows.DOES_NOT}
    measured = tuple(VersionAnswer(torch=torch, showing=Showing(shows=shows)) for torch, shows in answers.items())
    assert ShownIn(by=Method.REPLAY, versions=tuple(answers), measured=measured).specifiers == (">=2.9.1,<2.10",)
