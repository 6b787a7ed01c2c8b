"""Profiles of this repository's own tests: ``ci``, ``dev`` and ``nightly``, by ``--hypothesis-profile``."""

from __future__ import annotations

from equivcheck.profiles import register_profiles

register_profiles(prefix="")
