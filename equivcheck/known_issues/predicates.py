"""Every predicate that an entry of known.toml may name."""

from __future__ import annotations

from equivcheck.composition.registry import import_parts
from equivcheck.known_issues import compile_predicates, training_predicates
from equivcheck.layouts.known_predicates import NEEDS, SHOWS

import_parts("known")

__all__ = ["NEEDS", "SHOWS", "compile_predicates", "training_predicates"]
