"""Every predicate that an entry of known.toml may name."""

from __future__ import annotations

import equivcheck.known_issues.compile_predicates
import equivcheck.known_issues.compiled_hooks
import equivcheck.known_issues.training_predicates  # noqa: F401 - importing registers, as below
from equivcheck.composition.registry import import_parts
from equivcheck.layouts.known_predicates import NEEDS, SHOWS

__all__ = ["NEEDS", "SHOWS"]

import_parts("known")
