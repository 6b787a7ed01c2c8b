"""Tables of all predicates that known.toml can name."""

from __future__ import annotations

import equivcheck.oracle.known_issues.compile_predicates
import equivcheck.oracle.known_issues.compiled_hooks
import equivcheck.oracle.known_issues.training_predicates  # noqa: F401 - importing registers, as below
from equivcheck.layouts.base.known_predicates import NEEDS, SHOWS
from equivcheck.layouts.composition.registry import SHIPPED, shipped_kind

__all__ = ["NEEDS", "SHOWS"]

for tag in SHIPPED:
    shipped_kind(tag).import_known()
