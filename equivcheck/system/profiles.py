"""Hypothesis profiles for property tests of parallel trainings.

Meant for the entry-point group ``hypothesis``: they exist as soon as Hypothesis is imported, before pytest loads the one that
``--hypothesis-profile`` names.
"""

from __future__ import annotations

PREFIX = "equivcheck-"
"""Keeps the installed profiles apart from those of the tests that they are used in."""

EXAMPLES = {"ci": 100, "dev": 20, "nightly": 1000}
"""Examples a test by profile."""


def register_profiles(prefix: str = PREFIX) -> None:
    """Register `ci` (the same examples each time, no database), `dev` (few) and `nightly` (many, with a database) under a prefix.

    `ci` derives from Hypothesis's own, the others from its default: what is set there holds. None has a deadline, as a check
    takes as long as its ranks need.
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
