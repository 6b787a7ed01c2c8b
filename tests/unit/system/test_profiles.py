"""Tests for the Hypothesis profiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from equivcheck.system.profiles import EXAMPLES, register_profiles


@pytest.fixture(autouse=True)
def _profiles_as_they_were() -> Iterator[None]:
    """Restore the profiles."""
    before = dict(settings._profiles)
    yield
    settings._profiles.clear()
    settings._profiles.update(before)


@pytest.mark.parametrize("name", EXAMPLES)
def test_profiles_have_no_deadline_and_their_number_of_examples(name: str) -> None:
    """No profile has a deadline because a check takes as long as its ranks need."""
    register_profiles()
    profile = settings.get_profile(f"equivcheck-{name}")
    assert profile.deadline is None
    assert profile.max_examples == EXAMPLES[name]
    assert profile.derandomize == (name == "ci")
    assert (profile.database is None) == (name == "ci")


def test_installed_profiles_leave_others_alone() -> None:
    """Only prefixed profiles are registered."""
    before = dict(settings._profiles)
    register_profiles()
    assert {name: profile for name, profile in settings._profiles.items() if not name.startswith("equivcheck-")} == {
        name: profile for name, profile in before.items() if not name.startswith("equivcheck-")
    }


def test_what_is_set_in_a_profile_holds_when_it_is_registered_again() -> None:
    """Settings made in `ci` hold if `ci` is registered again on top of it."""
    settings.register_profile("ci", settings.get_profile("ci"), stateful_step_count=7)
    register_profiles(prefix="")
    assert settings.get_profile("ci").stateful_step_count == 7
