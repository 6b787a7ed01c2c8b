"""Hypothesis profiles for property tests of parallel trainings.

The entry-point group ``hypothesis`` loads them when Hypothesis is imported, before pytest reads ``--hypothesis-profile``.
"""

from __future__ import annotations

PREFIX = "equivcheck-"
"""Prefix to separate the installed profiles from those in the user's tests."""

EXAMPLES = {"ci": 100, "dev": 20, "nightly": 1000}
"""Examples per test for each profile."""


def register_profiles(prefix: str = PREFIX) -> None:
    """Register three Hypothesis profiles whose names begin with `prefix`: `ci`, `dev` and `nightly`.

    `ci` runs fixed examples without a database, `dev` runs few examples, and `nightly` runs many with a database. `ci` inherits
    from Hypothesis's profile `ci`, and the others from its profile `default`, so they follow changes to these. No profile has a
    deadline because a check takes as long as its ranks need.
    """
    # Not above: Hypothesis imports this module while it is being imported itself.
    from hypothesis import settings

    default = settings.get_profile("default")
    settings.register_profile(
        f"{prefix}ci", settings.get_profile("ci"), max_examples=EXAMPLES["ci"], derandomize=True, database=None, deadline=None
    )
    settings.register_profile(f"{prefix}dev", default, max_examples=EXAMPLES["dev"], derandomize=False, deadline=None)
    settings.register_profile(
        f"{prefix}nightly", default, max_examples=EXAMPLES["nightly"], derandomize=False, deadline=None, print_blob=True
    )
