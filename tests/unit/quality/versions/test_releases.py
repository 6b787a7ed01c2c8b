"""Which versions of torch a text names."""

from __future__ import annotations

import pytest
from packaging.version import Version

from equivcheck.errors import UsageError
from equivcheck.quality.versions.releases import RELEASED, chosen_releases, needs_index
from equivcheck.system.torch_version import OLDEST


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("2.13.0", "2.13.0"),
        ("2.9", "2.9.1"),
        ("2.13.0,2.9.0", "2.9.0 2.13.0"),
        ("2.9..2.12", "2.9.1 2.10.0 2.11.0 2.12.1"),
        ("2.9.0..2.12.0", "2.9.0 2.10.0 2.11.0 2.12.0"),
        ("2.14..", "2.14.1 2.15.0"),
        ("..2.10", "2.9.1 2.10.0"),
        ("2.9,2.14..2.15, 2.14", "2.9.1 2.14.1 2.15.0"),
    ],
)
def test_a_range_has_the_last_patch_of_each_minor_version(text: str, versions: str) -> None:
    """Ends are part of it, with their own patch number if they have one; what is named twice is there once, oldest first."""
    assert chosen_releases(text, RELEASED) == tuple(map(Version, versions.split()))


def test_a_version_at_hand_is_taken_before_a_later_patch() -> None:
    """An environment that is there need not be made, and a nightly build counts if it is there."""
    at_hand = (Version("2.14.0"), Version("2.16.0.dev20261120"))
    assert chosen_releases("2.13..", RELEASED, at_hand) == tuple(
        map(Version, ("2.13.0", "2.14.0", "2.15.0", "2.16.0.dev20261120"))
    )


def test_a_range_of_nightly_builds_has_all_between() -> None:
    """Each of them may be the first that has a change; a range that begins with a release has the named one alone."""
    nightlies = tuple(Version(f"2.16.0.dev202611{day:02}") for day in range(1, 8))
    there = (*RELEASED, *nightlies)
    assert chosen_releases("2.16.0.dev20261102..2.16.0.dev20261105", there) == nightlies[1:5]
    assert chosen_releases("2.15.0..2.16.0.dev20261105", there) == (Version("2.15.0"), nightlies[4])
    assert needs_index("2.16.0.dev20261105")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2.99.0", "torch version 2.99.0 is not valid: no such release. Expected one of 2.9.0, "),
        ("2.8", "torch version 2.8 is not valid: no such release. Expected one of 2.9.0, "),
        ("new", "torch version 'new' is not valid"),
        ("2.15..2.9", "the last is older than the first"),
        ("", "torch version '' is not valid"),
    ],
)
def test_what_is_no_version_is_refused(text: str, words: str) -> None:
    """By name, with what is allowed."""
    with pytest.raises(UsageError, match=words):
        chosen_releases(text, (*RELEASED, Version("2.8.0")))


def test_only_whole_versions_need_no_index() -> None:
    """Whether a later patch or minor version is out matters for ranges and minor versions alone."""
    assert [needs_index(text) for text in ("2.9.1", "2.9.1,2.13.0", "2.9", "2.9.1..2.13.0", "2.9.1,2.14")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_no_release_is_older_than_what_is_supported() -> None:
    """The table of releases begins where support does."""
    assert min(RELEASED) == OLDEST
